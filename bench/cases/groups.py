"""The classic way to make process groups: every rank loops over every group of the world."""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist
from torch.distributed import ProcessGroup


def loop_groups(world_size: int, tensor: int, pipeline: int) -> Iterator[tuple[str, list[int]]]:
    """Kind and ranks of each group that the loops create, in their order."""
    stage = world_size // pipeline
    data = stage // tensor
    data_groups = [
        list(range(p * stage + t, (p + 1) * stage, tensor)) for p in range(pipeline) for t in range(tensor)
    ]
    yield from (("dp", ranks) for ranks in data_groups)
    yield from (("model", [ranks[i] for ranks in data_groups]) for i in range(data))
    for first in range(0, world_size, tensor):
        yield "tp", list(range(first, first + tensor))
    for first in range(stage):
        ranks = list(range(first, world_size, stage))
        yield "pp", ranks
        yield "embedding", sorted({ranks[0], ranks[-1]})
        yield "position_embedding", ranks[:1]


def initialize_by_loops(tensor: int, pipeline: int) -> dict[str, ProcessGroup]:
    """This rank's groups, created by all ranks together, one after the other."""
    own = {}
    for kind, ranks in loop_groups(dist.get_world_size(), tensor, pipeline):
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            own[kind] = group
    return own
