"""Process groups as ours, and the classic way: every rank loops over every group of the world."""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist
from torch.distributed import ProcessGroup

from bench.measure import Seconds, Way, interleave, seconds_on_clock
from tpkernels import parallel_state
from tpkernels.groups.initialize import destroy_model_parallel, initialize_model_parallel


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


def forget_loops() -> None:
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def initialization(tensor: int, pipeline: int, rounds: int) -> Seconds:
    """On every rank: seconds until the slowest rank has made its groups, after a look at who is in them."""
    undo: dict[Way, Way] = {
        lambda: initialize_model_parallel(tensor, pipeline): destroy_model_parallel,
        lambda: initialize_by_loops(tensor, pipeline): forget_loops,
    }

    def seconds(make: Way) -> float:
        dist.barrier()
        taken = seconds_on_clock(lambda: (make(), dist.barrier()))
        undo[make]()
        return taken

    _check_members(tensor, pipeline)
    return interleave(dict(zip(("ours", "naive"), undo, strict=True)), rounds, seconds)


def _check_members(tensor: int, pipeline: int) -> None:
    initialize_model_parallel(tensor, pipeline)
    ours = {
        "tp": parallel_state.get_tensor_model_parallel_group(),
        "pp": parallel_state.get_pipeline_model_parallel_group(),
        "dp": parallel_state.get_data_parallel_group(),
    }
    members = {kind: dist.get_process_group_ranks(group) for kind, group in ours.items()}
    destroy_model_parallel()
    for kind, ranks in loop_groups(dist.get_world_size(), tensor, pipeline):
        if kind in members and dist.get_rank() in ranks:
            assert members[kind] == ranks, f"{kind}: expected {ranks}, got {members[kind]}"
