"""How long the reduction of a bucket takes in each of several memories, on GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from tpkernels.comm.groups import start_all_reduce, start_reduce_scatter

Reduction = Literal["all_reduce", "reduce_scatter"]

WARM_UPS, ROUNDS = 3, 8  # the first calls connect ranks, and exchange handles of registered memory


def milliseconds(group: ProcessGroup, flats: Sequence[Tensor], reduction: Reduction) -> list[float]:
    """Of the reduction of each, here: interleaved, and the lower quartile of the rounds.

    All ranks of the group call this at once. flats: full of zeros, which stay
    """
    marks: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in flats]
    with torch.no_grad(), torch.cuda.device(flats[0].device):
        for number in range(WARM_UPS + ROUNDS):
            for flat, own in zip(flats, marks, strict=True):
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                reduce(group, flat, reduction)
                end.record()
                if number >= WARM_UPS:
                    own.append((begin, end))
        torch.cuda.synchronize()
    return [sorted(begin.elapsed_time(end) for begin, end in own)[ROUNDS // 4] for own in marks]


def reduce(group: ProcessGroup, flat: Tensor, reduction: Reduction) -> None:
    """As buckets are reduced: in place. The current stream waits."""
    if reduction == "all_reduce":
        start_all_reduce(group, flat, ReduceOp.SUM, None).wait()
    else:
        shard = flat.tensor_split(group.size())[group.rank()]
        start_reduce_scatter(group, shard, flat, ReduceOp.SUM, None).wait()
