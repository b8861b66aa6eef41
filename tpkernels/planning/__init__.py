"""Which layout of ranks suits a model: memory and time as arithmetic on sizes. Loads no torch."""
