"""The clock: what a kernel costs on a GPU, in cycles, from its machine code and without a GPU."""
