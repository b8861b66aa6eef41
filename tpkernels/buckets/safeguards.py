"""Against wrong numbers that no error tells: optimizers that step too early, and weights that begin unlike.

A step before `finish` takes this rank's gradients for those of all, and ranks drift apart. They never agree
if they begin with other weights: averaged gradients keep the distance.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from tpkernels.comm.agreement import Claim, agree
from tpkernels.comm.supported import Problem
from tpkernels.runtime.checksums import sums_of_bits


class Watched(Protocol):
    def unfinished(self) -> Sequence[Tensor]:
        """All parameters while gradients have come that are not reduced; else none."""


_watched: WeakSet[Watched] = WeakSet()


def refuse_early_steps(buckets: Watched) -> None:
    """From now on optimizers of its parameters do not step before `finish`."""
    _watched.add(buckets)
    _look_before_steps()


@cache
def _look_before_steps() -> None:
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, _: tuple[Any, ...], __: dict[str, Any]) -> None:
    """Called by torch before each step of each optimizer."""
    if torch.compiler.is_compiling():
        return
    unfinished = {id(parameter) for buckets in list(_watched) for parameter in buckets.unfinished()}
    if unfinished and any(id(p) in unfinished for group in optimizer.param_groups for p in group["params"]):
        raise RuntimeError(
            "GradientBuckets: an optimizer steps between a backward and finish(), by gradients that are not "
            "reduced; call finish() after the last backward of a step, then clip, then step"
        )


def require_equal_weights(named: Iterable[tuple[str, Tensor]], groups: Sequence[ProcessGroup]) -> None:
    """All ranks of the first group have the same bits in these, or those of all groups raise an error."""
    names, tensors = zip(*named, strict=True) if groups[0].size() > 1 else ((), ())
    sums = zip(names, sums_of_bits(tensors), strict=True)
    claims = tuple(f"'{name}' with checksum {checksum}" for name, checksum in sums)
    problem: Problem | None = None
    try:
        agree(Claim("GradientBuckets begin with other weights on other ranks", claims), groups[0])
    except ValueError as error:
        problem = (
            "ValueError",
            (
                f"{error}. Averaged gradients would not bring them together, and weights are not sent, as "
                "DistributedDataParallel does: draw them by one seed, load one checkpoint, or "
                "bucketed_broadcast_(list(model.parameters()), src, group) before the first step"
            ),
        )
    for group in groups[1:]:
        agree(Claim("GradientBuckets", (), problem), group)
    if problem:
        raise ValueError(problem[1])
