"""Orders of adding that TP-invariance cannot have: they would depend on the tensor-parallel size."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tpkernels.comm.supported import Problem
from tpkernels.tp_invariance import mode


def refuse_backend(ranks: int, why: str) -> None:
    """An error if so many data-parallel ranks would be added up by a backend. why: it does"""
    if ranks > 2 and mode.fix("GradientBuckets"):
        raise ValueError(
            f"GradientBuckets: expected 1 or 2 data-parallel ranks with TP-invariance, got {ranks} ({why}): "
            "with more, backends add a gradient in an order that depends on where in its bucket it lies; "
            "ranks of one machine, which share memory, add in their own order"
        )


def problem_of_order(named: Sequence[tuple[str, Tensor]], marked: Sequence[bool]) -> Problem | None:
    """Why buckets of these parameters cannot be reduced, if so.

    marked: by parameter, whether its gradient is summed over the tensor-parallel group as well
    """
    if not mode.fix("GradientBuckets"):
        return None
    for (name, _), is_marked in zip(named, marked, strict=True):
        if is_marked:
            return "ValueError", (
                f"'{name}' is marked sequence_parallel: its gradient would be added over tensor-parallel "
                "ranks in an order that TP-invariance does not know; give ops the group, as norms do"
            )
    return None
