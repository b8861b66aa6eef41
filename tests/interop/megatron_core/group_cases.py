"""What ranks do with Megatron's groups, grids and collections."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from tests.checks import error_of
from tests.interop.megatron_core.megatrons_groups import GETTERS
from tpkernels import ParallelMLP, destroy_parallel_state, manual_seed, parallel_state
from tpkernels.interop.megatron_core import parallel_state as ps
from tpkernels.interop.megatron_core.grid import HyperCommGrid
from tpkernels.interop.megatron_core.groups import ProcessGroupCollection, from_megatron
from tpkernels.runtime.listed_groups import Listed, create_listed_groups
from tpkernels.runtime.state import current, use


def total(group: Any) -> float:
    x = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(x, group=group)
    return x.item()


def sums() -> dict[str, bool]:
    """Whether every group of Megatron's adds up its ranks; initialized twice, with other sizes between."""
    found = {}
    for sizes in ((2, 2), (1, 4), (2, 1)):
        ps.initialize_model_parallel(*sizes, create_all_gather_group=True)
        for name, arguments in GETTERS:
            group = getattr(ps, name)(**arguments)
            if group is not None:
                ranks = dist.get_process_group_ranks(group)
                found[f"{sizes} {name}"] = total(group) == sum(ranks)
        twin = ps.get_data_parallel_group(True, independent_all_gather=True)
        found[f"{sizes} twin"] = total(twin) == total(ps.get_data_parallel_group(True))
        found[f"{sizes} other"] = twin is not ps.get_data_parallel_group(True)
        found[f"{sizes} gloo"] = ps.get_data_parallel_group_gloo(True) is ps.get_data_parallel_group(True)
        ps.destroy_model_parallel()
    return found


def disagreement() -> tuple[str, str]:
    return error_of(ps.initialize_model_parallel, 2, create_all_gather_group=dist.get_rank() == 3)


def two_grids() -> list[Any]:
    """Ranks 0 and 1 on one grid, 2 and 3 on another, each making its groups without the other."""
    own = dist.get_rank() // 2
    grid = HyperCommGrid([1, 2], ["tp", "dp"], rank_offset=2 * own)
    for _ in range(own):  # the second grid's ranks make more groups
        grid.create_pg("tp")
    data = grid.create_pg("dp")
    other = HyperCommGrid([2], ["tp"], rank_offset=2 - 2 * own).create_pg("tp")  # not this rank's
    again = error_of(grid.create_pg, ["dp"])
    both = grid.create_pg(["dp", "tp"]) if own else None
    found = [dist.get_process_group_ranks(data), total(data), other, grid.get_pg("dp") is data, again[0]]
    found += [both and dist.get_process_group_ranks(both), error_of(grid.get_pg, "pp")[0]]
    grid.destroy()
    return [*found, error_of(grid.get_pg, "dp")[0]]


def uneven_history() -> list[float]:
    """Members that have made different groups before meet all the same."""
    rank = dist.get_rank()
    if rank == 1:
        ps.create_group([1])
    group = ps.create_group([1, 2]) if rank in (1, 2) else None
    everyone = ps.create_group(group_desc="all")
    outside = ps.create_group([0, 3])
    inner, _ = ps.create_hierarchical_groups(rank, range(4), [2, 2], group_desc="levels")
    return [
        total(group) if group else -1.0,
        total(everyone),
        total(outside) if rank in (0, 3) else float(outside is dist.GroupMember.NON_GROUP_MEMBER),
        total(inner[0]),
        total(inner[1]),
    ]


def listed_wrongly() -> list[tuple[str, str]]:
    lists = {"a": Listed([[0, 1], [1, 2, 3]])}, {"b": Listed([[0, 1, 2, 3, 4]])}
    differs = {"c": Listed([[0, 1], [2, 3]] if dist.get_rank() else [[0, 2], [1, 3]])}
    return [error_of(create_listed_groups, each) for each in (*lists, differs)]


def reference_mlp(state: Any) -> list[float]:
    mlp = ParallelMLP(8, 16, activation="gelu", state=state)
    x = torch.linspace(-1, 1, 24).view(3, 8).requires_grad_()
    y = mlp(x)
    y = y[0] if isinstance(y, tuple) else y
    y.square().sum().backward()
    assert x.grad is not None
    return [float(y.detach().sum()), float(x.grad.sum())]


def an_mlp_of_groups_that_are_passed() -> list[list[float]]:
    """The same numbers by a collection, by one of Megatron's kind, by the group, by the current state."""
    ps.initialize_model_parallel(2)
    found = []
    collection = ProcessGroupCollection.use_mpu_process_groups(["tp", "dp"])
    holder = SimpleNamespace(tp=collection.tp)
    for state in (None, collection, holder, collection.tp, from_megatron(collection)):
        manual_seed(5)
        found.append(reference_mlp(state))
    return found


class One:
    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


def an_mlp_of_one() -> list[list[float]]:
    ps.initialize_model_parallel()
    found = []
    for state in (None, One(), SimpleNamespace(tp=One())):
        manual_seed(5)
        found.append(reference_mlp(state))
    return found


def adopted() -> dict[str, Any]:
    """What tpkernels says of groups that Megatron has made, and Megatron of the same."""
    theirs = import_module("megatron.core.parallel_state")
    before = error_of(from_megatron)
    theirs.initialize_model_parallel(2, 2)
    state = from_megatron()
    with use(state):
        manual_seed(3)
        found = {
            "tensor rank": (
                parallel_state.get_tensor_model_parallel_rank(),
                theirs.get_tensor_model_parallel_rank(),
            ),
            "stage": (state.plan.stage_of(state.rank), theirs.get_pipeline_model_parallel_rank()),
            "embedding": (state.is_member("embedding"), theirs.is_rank_in_embedding_group()),
            "position": (state.is_member("position_embedding"), theirs.is_rank_in_position_embedding_group()),
            "tp_dp": (state.ranks("tp_dp"), tuple(range(state.rank // 2 * 2, state.rank // 2 * 2 + 2))),
            "group": (state.process_group("tp") is theirs.get_tensor_model_parallel_group(), True),
            "mlp": (reference_mlp(None), reference_mlp(theirs.get_tensor_model_parallel_group())),
        }
        found["mlp"] = (len(found["mlp"][0]), len(found["mlp"][1]))
        found["current"] = (current() is state, True)
    destroy_parallel_state(state)
    found["alive"] = (total(theirs.get_tensor_model_parallel_group()) > 0, True)
    found["before"] = (before[0], "ParallelStateError")
    theirs.destroy_model_parallel()
    return {name: pair for name, pair in found.items() if pair[0] != pair[1]}
