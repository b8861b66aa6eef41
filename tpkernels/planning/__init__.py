"""Predicts memory and time of layouts of ranks for a model, by arithmetic on sizes. Loads no torch."""
