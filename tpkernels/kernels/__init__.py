"""Triton kernels: each with its launcher, and a torch oracle in `reference`. Imports no other room.

A launcher takes 2-D tensors (the ops flatten leading dimensions), validates them, allocates its outputs
and never changes its inputs. `import tpkernels.kernels` loads neither Triton nor torch; each module does.
"""
