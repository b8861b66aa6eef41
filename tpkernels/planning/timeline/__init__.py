"""What a tensor-parallel call takes on R GPUs, event by event: a model. Loads no torch."""
