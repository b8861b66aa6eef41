"""Sums of products in fp8 in few bits, as on Hopper's tensor cores by DeepSeek-V3's report (2024, 3.5.2).

32 products and the sum so far are shifted to the largest exponent among them, and cut off below its 14 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

BITS = 14  # of a sum, the first one included
AT_ONCE = 32  # products that one instruction adds


def summed(x: Tensor, weight: Tensor, promote_every: int | None = None, bits: int = BITS) -> Tensor:
    """Compute x weightᵀ as tensor cores with sums of so many bits do; float64.

    x, weight: (rows, depth), any numbers whose products float64 holds
    promote_every: what depth they sum before it is added in fp32; None: all of it
    """
    x, weight = x.double(), weight.double()
    total = x.new_zeros(x.shape[0], weight.shape[0])
    depth = x.shape[1]
    for first in range(0, depth, promote_every or max(depth, 1)):
        last = min(first + (promote_every or depth), depth)
        sums = torch.zeros_like(total)
        for k in range(first, last, AT_ONCE):
            step = slice(k, min(k + AT_ONCE, last))
            sums = _added(sums, x[:, None, step] * weight[None, :, step], bits)
        total = (total + sums).float().double() if promote_every else sums
    return total


def _added(sums: Tensor, products: Tensor, bits: int) -> Tensor:
    """sums: (M, N); products: (M, N, few)"""
    terms = torch.cat([sums[..., None], products], -1)
    unit = _last_bit(terms.abs().amax(-1), bits)
    exact = (terms / unit[..., None]).trunc_().sum(-1) * unit
    kept = _last_bit(exact.abs(), bits)
    return (exact / kept).trunc_() * kept


def _last_bit(largest: Tensor, bits: int) -> Tensor:
    """What the last of so many bits is worth, in a number of this size."""
    return torch.exp2(torch.frexp(largest).exponent.double() - bits)
