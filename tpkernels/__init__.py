"""Tensor-parallel layers for PyTorch on fused Triton kernels with overlapped communication."""
