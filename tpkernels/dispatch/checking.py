"""Whether a candidate computes what torch does: by norm over all of a result, and over each block of it.

One tile of zeros is nothing in the norm of a large result: a tile of 128 x 256 is 3 % of 8192 x 4096. In its
own blocks it is everything.

Candidates are checked and timed on scratch operands: random, laid out like the user's, and apart from them.
So a choice does not depend on what a batch happens to hold (zeros multiply faster, and prove nothing), and
what accumulates does so where nobody looks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from tpkernels.dispatch.candidates import TuneKey
from tpkernels.dispatch.record import Primitive
from tpkernels.kernels.operands import FP8, are_halves, stacked

ALIGNMENT = 16  # bytes; more of it decides nothing
FP8_SIZE = 64.0  # of elements in fp8: as if the largest of thousands had been scaled to 448
BLOCK = 16  # rows and columns: no tile of a kernel is smaller
FEW = 16.0  # see `allowed`

# What one rounding to nearest adds to a result's norm, as a part of it: half of the last bit spread evenly
# (ulp / sqrt 12), over values spread evenly in their powers of two.
ROUNDING: Mapping[torch.dtype, float] = {
    torch.float32: 2.5e-8,
    torch.float16: 2.1e-4,
    torch.bfloat16: 1.66e-3,
}
# Between two honest 16-bit results lie the kernel's rounding and torch's: one for a product (together sqrt 2
# = 1.4 roundings), up to four for a gated unit (two products, the gate, their product: sqrt 5 = 2.2, where
# the slope of the gate adds some), or six where cuBLAS adds up to eight parts of a split reduction in 16 bits
# (sqrt 7 = 2.6). 3.6 roundings are 6e-3 of bf16, 7.5e-4 of fp16.
ROUNDINGS = 3.6
# tf32 keeps 10 bits behind the point. To cut the others off makes each operand smaller by 3.5e-4 on average,
# hence the product by 7e-4; to round does not. What is random about either is 3e-4 in a sum of any length.
TF32_BOUND = 2e-3
# Hopper adds products of fp8 with some 14 bits, and cuts the others off: up to 2e-3 of a sum of 128 if all
# errors have one sign, 1e-4 where signs are random. Sums of more than 128 are kept in fp32.
FP8_BOUND = 2e-3
# With fast accumulation they are not: emulated, random sums are off by 2.1e-5 times the root of their depth.
FAST_BOUND = 5e-5

Outputs = tuple[Tensor | None, ...]


def scratch_like(arguments: tuple[Any, ...], depth: int, device: torch.device) -> tuple[Any, ...]:
    """Return the arguments with other tensors, on `device`; the user's random stream is left alone.

    depth: length of the reduction; its fourth root keeps products at a size of one, within any dtype
    """
    generator = torch.Generator(device).manual_seed(0)
    scale = max(depth, 1) ** -0.25
    scaled = any(isinstance(argument, Tensor) and argument.dtype in FP8 for argument in arguments)
    made = [
        _scratch(argument, scale, scaled, generator) if isinstance(argument, Tensor) else argument
        for argument in arguments
    ]
    for i, pair in enumerate(pairwise(arguments)):  # weights that are one remain so
        if all(isinstance(each, Tensor) and each.ndim == 2 for each in pair) and are_halves(*pair):
            made[i : i + 2] = _scratch(stacked(*pair), scale, scaled, generator).chunk(2)
    return tuple(made)


def _scratch(like: Tensor, scale: float, scaled: bool, generator: torch.Generator) -> Tensor:
    """scaled: beside matrices in fp8, those in fp32 are their scales"""
    offset = like.data_ptr() % ALIGNMENT // like.element_size()
    extent = offset + 1 + sum((n - 1) * s for n, s in zip(like.shape, like.stride(), strict=True))
    memory = torch.empty(extent, dtype=like.dtype, device=generator.device)
    if like.dtype in FP8:
        wide = torch.randn(extent, generator=generator, device=generator.device)
        memory.copy_(wide.mul_(FP8_SIZE).clamp_(-448, 448))
    elif scaled and like.ndim == 2 and like.dtype == torch.float32:
        memory.uniform_(0.5, 1.5, generator=generator).mul_(scale / FP8_SIZE)
    elif like.is_floating_point() and like.ndim == 1:
        # a bias is added to products of a size of one: a column that goes without it is far off
        memory.uniform_(0.5, 1.5, generator=generator)
    elif like.is_floating_point():
        memory.normal_(std=scale, generator=generator)
    else:
        memory.zero_()
    return memory.as_strided(like.shape, like.stride(), offset)


def results_of(record: Primitive[..., Any], run: Callable[..., Any], arguments: tuple[Any, ...]) -> Outputs:
    """Return a candidate's results for these arguments, and leave all arguments unchanged."""
    if record.changes_first:
        changed, *others = arguments
        changed = changed.clone()
        run(changed, *others)
        return (changed,)
    results: Any = run(*arguments)
    return tuple(results) if isinstance(results, tuple) else (results,)


def poison_freed(results: Outputs) -> None:
    """Leave NaN in freed memory of these sizes, which the next results of such sizes are given.

    It may hold right results of another candidate: what a candidate does not write would not show.
    """
    poisoned = [torch.full_like(one, torch.nan) for one in results if one is not None]
    del poisoned  # all at once, so that each has a block of its own


def bound_of(key: TuneKey) -> float:
    """How far two honest results of many values may be apart, as a part of their norm."""
    if key.tf32:
        return TF32_BOUND
    rounding = ROUNDING[key.result]
    if key.dtype in FP8:
        fast = FAST_BOUND * sqrt(key.depth) if "fast" in key.options else 0.0
        return FP8_BOUND + fast + ROUNDINGS * rounding
    if key.dtype != torch.float32:
        return ROUNDINGS * rounding
    # n terms added one by one in fp32: the k-th sum, sqrt k large, is rounded. All in all that is sqrt(n / 2)
    # roundings of the last one, and sqrt n between two results. Twice that: terms may differ in size.
    return 2 * rounding * (ROUNDINGS + sqrt(max(key.depth, key.tokens)))


def allowed(bound: float, count: int) -> float:
    """Return the bound for a norm of only `count` values.

    A single value may round by its whole last bit, and may lie where its function multiplies errors. What
    remains of that falls like any average's.
    """
    return bound * (1 + FEW / sqrt(count))


def mismatch(actual: Outputs, expected: Outputs, key: TuneKey) -> str | None:
    """In words, where and how far a result is off; None if it is right."""
    bound = bound_of(key)
    for i, (ours, torchs) in enumerate(zip(actual, expected, strict=True)):
        if ours is None or torchs is None:
            if ours is not torchs:
                return f"result {i} is there for one, not for the other"
            continue
        if (ours.shape, ours.dtype) != (torchs.shape, torchs.dtype):
            return (
                f"result {i} is {tuple(ours.shape)} in {ours.dtype}, "
                f"expected {tuple(torchs.shape)} in {torchs.dtype}"
            )
        if ours.numel() and (words := _far_off(torch.atleast_2d(ours), torch.atleast_2d(torchs), bound)):
            return f"result {i} is off by {words}"
    return None


def _far_off(actual: Tensor, expected: Tensor, bound: float) -> str | None:
    rows, cols = expected.shape
    height = min(BLOCK, rows)
    width = min(BLOCK * BLOCK // height, cols)  # few rows are cut into wider blocks of as many values
    errors = _sums((actual.float() - expected).square_(), height, width)
    sizes = _sums(expected.float().square(), height, width)

    # of a block: where much cancels out, less is left than rounding leaves everywhere
    typical = sizes.mean().clamp(min=torch.finfo(torch.float32).tiny)
    parts, whole = (errors / sizes.clamp(min=typical)).sqrt_(), float((errors.mean() / typical).sqrt())
    limit, most = allowed(bound, height * width), allowed(bound, rows * cols)
    if bool((parts <= limit).all()) and whole <= most:  # a NaN is neither
        return None
    worst = int(parts.nan_to_num(nan=float("inf")).argmax())  # counted row by row
    # the last block of a dimension begins so early that it is a whole one
    top, left = worst // parts.shape[1] * height, worst % parts.shape[1] * width
    top, left = min(top, rows - height), min(left, cols - width)
    return (
        f"{whole:.1e} of itself, allowed {most:.1e}; most at rows {top} to {top + height - 1}, columns "
        f"{left} to {left + width - 1}: {float(parts.flatten()[worst]):.1e}, allowed {limit:.1e}"
    )


def _sums(x: Tensor, height: int, width: int) -> Tensor:
    """Over each block; the last ones of a dimension that blocks do not divide overlap those before."""
    return _sums_of_rows(_sums_of_rows(x, height).t(), width).t()


def _sums_of_rows(x: Tensor, height: int) -> Tensor:
    even = x.shape[0] // height * height
    sums = x[:even].unflatten(0, (-1, height)).sum(1)
    return sums if even == x.shape[0] else torch.cat([sums, x[-height:].sum(0, keepdim=True)])
