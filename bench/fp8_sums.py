"""`python -m bench fp8_sums`: what sums of few bits add to the error of products in fp8, by depth.

Hopper's tensor cores add products of fp8 in few bits, about 14 by DeepSeek-V3's report (2024, section 3.5.2):
32 products and the sum so far are shifted to the largest exponent among them, and cut off below its 14 bits.
That is emulated here, of all the depth (fast accumulation) and of 128, whose sums are then added in fp32. No
GPU was asked: this is the report's account of them, not a measurement of ours.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from tpkernels.kernels.recipe import BLOCK
from tpkernels.kernels.scaled import Scaled, quantize_ref

BITS = 14  # of a sum, the first one included
AT_ONCE = 32  # products that one instruction adds
DEPTHS = (512, 1024, 2048, 4096, 8192, 16384)
ROWS = 64  # of x, and of the weight


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


def _normal(rows: int, depth: int, generator: torch.Generator) -> Tensor:
    return torch.randn(rows, depth, generator=generator)


def _positive(rows: int, depth: int, generator: torch.Generator) -> Tensor:
    return torch.rand(rows, depth, generator=generator)


def _correlated(rows: int, depth: int, generator: torch.Generator) -> Tensor:
    """Rows of one direction, but for as much of their own: their products do not cancel."""
    direction = torch.randn(depth, generator=torch.Generator().manual_seed(1))
    return direction + torch.randn(rows, depth, generator=generator)


KINDS: Mapping[str, Callable[[int, int, torch.Generator], Tensor]] = {
    "normal": _normal,
    "correlated": _correlated,
    "all positive": _positive,
}


def error_of(kind: str, depth: int, promote_every: int | None, rows: int = ROWS) -> float:
    """‖sums of few bits - exact sums‖ / ‖exact sums‖, of the same numbers in fp8."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (
        Scaled(quantize_ref(KINDS[kind](rows, depth, generator), "e4m3", "rows"), depth, "e4m3", "rows").data
        for _ in range(2)
    )
    exact = x.double() @ weight.double().t()
    return float((summed(x, weight, promote_every) - exact).norm() / exact.norm())


def row_of(depth: int) -> str:
    cells = [
        f"{100 * error_of(kind, depth, promote_every):.3f}"
        for kind in KINDS
        for promote_every in (None, BLOCK)
    ]
    return f"| {depth:,} | {' | '.join(cells)} |"


def add_options(parser: ArgumentParser, words: Sequence[str]) -> None:
    """It takes no options."""


def main(options: Namespace) -> int:
    print(f"| depth | {' | '.join(f'{kind}: fast | promoted' for kind in KINDS)} |")
    print(f"|{'---|' * (1 + 2 * len(KINDS))}")
    for depth in DEPTHS:
        print(row_of(depth), flush=True)
    return 0
