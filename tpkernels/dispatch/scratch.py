"""Operands to time and check candidates on, and the check: does a candidate compute what torch does?

Operands are random, laid out like the user's, and apart from them.
So a choice does not depend on what a batch happens to hold (zeros multiply faster, and prove nothing), and
what accumulates does so where nobody looks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tpkernels.dispatch.problem import Problem
from tpkernels.dispatch.record import Primitive

ALIGNMENT = 16  # bytes; more of it decides nothing


def scratch_like(arguments: tuple[Any, ...], depth: int, device: torch.device) -> tuple[Any, ...]:
    """The same arguments with other tensors, on `device`; the user's random stream is left alone.

    depth: length of the reduction; its fourth root keeps products at a size of one, within any dtype
    """
    generator = torch.Generator(device).manual_seed(0)
    scale = max(depth, 1) ** -0.25
    return tuple(
        _scratch(argument, scale, generator) if isinstance(argument, Tensor) else argument
        for argument in arguments
    )


def _scratch(like: Tensor, scale: float, generator: torch.Generator) -> Tensor:
    offset = like.data_ptr() % ALIGNMENT // like.element_size()
    extent = offset + 1 + sum((n - 1) * s for n, s in zip(like.shape, like.stride(), strict=True))
    memory = torch.empty(extent, dtype=like.dtype, device=generator.device)
    if like.is_floating_point():
        memory.normal_(std=scale, generator=generator)
    else:
        memory.zero_()
    return memory.as_strided(like.shape, like.stride(), offset)


Results = tuple[Tensor | None, ...]

# Norm-wise, between two results that each round at different places. A kernel that is wrong is off by far
# more; one that is merely less accurate is the tests' business.
BOUND: Mapping[torch.dtype, float] = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
TF32_BOUND = 4e-3  # 11 bits of mantissa, like fp16


def results_of(record: Primitive[..., Any], run: Callable[..., Any], arguments: tuple[Any, ...]) -> Results:
    """What a candidate gives for these arguments, none of which stays changed."""
    if record.changes_first:
        changed, *others = arguments
        changed = changed.clone()
        run(changed, *others)
        return (changed,)
    results: Any = run(*arguments)
    return tuple(results) if isinstance(results, tuple) else (results,)


def mismatch(actual: Results, expected: Results, problem: Problem) -> str | None:
    """In words, how far a result is off; None if it is sound."""
    bound = TF32_BOUND if problem.tf32 else BOUND[problem.dtype]
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
        error, size = float((ours.float() - torchs.float()).norm()), float(torchs.float().norm())
        if not error <= bound * size:  # nor is a NaN
            return f"result {i} is off by {error:.1e} of {size:.1e}, allowed {bound:.0e} of it"
    return None
