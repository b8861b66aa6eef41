"""Training a GPT over tensor- and data-parallel ranks."""
