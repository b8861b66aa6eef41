"""Whether a candidate computes what plain torch does, up to the rounding of the dtype."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tpkernels.dispatch.problem import Problem, Step

Results = tuple[Tensor | None, ...]

# Norm-wise, between two results that each round at different places. A kernel that is wrong is off by far
# more; one that is merely less accurate is the tests' business.
BOUND: Mapping[torch.dtype, float] = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
TF32_BOUND = 4e-3  # 11 bits of mantissa, like fp16


def results_of(step: Step, run: Callable[..., Any], arguments: tuple[Any, ...]) -> Results:
    """What a candidate gives for these arguments, none of which it changes."""
    if step == "wgrad_accumulate_":
        main_grad, *factors = arguments
        main_grad = main_grad.clone()
        run(main_grad, *factors)
        return (main_grad,)
    results = run(*arguments)
    return tuple(results) if isinstance(results, tuple) else (results,)


def flaw(actual: Results, expected: Results, problem: Problem) -> str | None:
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
