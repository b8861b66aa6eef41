"""Orders of adding that TP-invariance cannot have: they would depend on the tensor-parallel size."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.distributed import ProcessGroup

from tpkernels.comm.supported import Problem
from tpkernels.tp_invariance import mode


def problem_of_order(
    group: ProcessGroup, named: Sequence[tuple[str, Tensor]], marked: Sequence[bool]
) -> Problem | None:
    """Why buckets of these parameters cannot be reduced, if so.

    marked: by parameter, whether its gradient is summed over the tensor-parallel group as well
    """
    if not mode.fix("GradientBuckets"):
        return None
    if group.size() > 2:
        return "ValueError", (
            f"group: expected 1 or 2 data-parallel ranks with TP-invariance, got {group.size()}: with more, "
            "backends add a gradient in an order that depends on where in its bucket it lies"
        )
    for (name, _), is_marked in zip(named, marked, strict=True):
        if is_marked:
            return "ValueError", (
                f"'{name}' is marked sequence_parallel: its gradient would be added over tensor-parallel "
                "ranks in an order that TP-invariance does not know; give ops the group, as norms do"
            )
    return None
