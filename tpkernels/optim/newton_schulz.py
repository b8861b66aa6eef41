"""Newton-Schulz: the nearest matrix with orthonormal rows or columns, roughly, by products alone."""

from __future__ import annotations

import torch
from torch import Tensor

NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # steepest at zero: singular values end between 0.7 and 1.2
NS_STEPS = 5
EPS = 1e-7


@torch.no_grad()
def orthogonalize(
    matrix: Tensor,
    *,
    ns_coefficients: tuple[float, float, float] = NS_COEFFICIENTS,
    ns_steps: int = NS_STEPS,
    eps: float = EPS,
) -> Tensor:
    """U Vᵀ, roughly, of a full matrix U S Vᵀ, in bfloat16: to the bit what torch.optim.Muon computes.

    eps: what a smaller Frobenius norm counts as
    """
    if matrix.ndim != 2:
        raise ValueError(f"orthogonalize: expected a matrix, got a tensor {tuple(matrix.shape)}")
    first, third, fifth = ns_coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.bfloat16()
    x = x.T if is_tall else x  # x xᵀ is the smaller product
    x = x / x.norm().clamp(min=eps)
    for _ in range(ns_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=third, alpha=fifth), x, beta=first)
    return x.T if is_tall else x


def multiplications(shape: tuple[int, ...]) -> int:
    """Of one step, for a matrix of this shape."""
    short, long = sorted(shape)
    return short * short * (2 * long + short)
