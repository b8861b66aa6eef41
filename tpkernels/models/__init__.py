"""Whole models, built of the layers."""
