"""Which rank belongs to which group: arithmetic only, no torch, no process groups.

>>> plan = plan_groups(world_size=16, tensor=2, pipeline=4)
>>> plan.groups["tp"][:3]
((0, 1), (2, 3), (4, 5))
>>> plan.groups["dp"][:3]
((0, 2), (1, 3), (4, 6))
>>> plan.groups["pp"][0]
(0, 4, 8, 12)
>>> plan.group_of(6, "model")
(2, 3, 6, 7, 10, 11, 14, 15)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Literal, get_args

from tpkernels.topology import sizes as check
from tpkernels.topology.grid import Grid, Ranks

Kind = Literal[
    "tp",  # tensor: one layer's weights are split over these ranks
    "cp",  # context: the sequence is split
    "ep",  # expert: the experts are spread
    "dp",  # data: the same weights, other samples
    "pp",  # pipeline: the layers are split
    "model",  # tensor x pipeline: together they hold one whole model
    "dp_cp",  # data x context: gradients of ordinary weights are summed here
    "expert_dp",  # the same experts, other samples: gradients of experts are summed here
    "embedding",  # stages of one pipeline that hold the word embedding
    "position_embedding",  # stages of one pipeline that hold the position embedding
    # Megatron's combinations of these
    "tp_cp",
    "tp_dp",
    "tp_dp_cp",
    "expert_tp",  # one expert's weights are split over these ranks: those of tp
    "expert_tp_ep",
    "expert_tp_ep_pp",
    "world",
    "alone",
]
COMBINED_KINDS: tuple[Kind, ...] = get_args(Kind)[10:]  # made where Megatron's names are asked for
KINDS: tuple[Kind, ...] = get_args(Kind)[:10]

_AXES_OF: Mapping[Kind, tuple[str, ...]] = {
    "tp": ("tp",),
    "cp": ("cp",),
    "dp": ("dp",),
    "pp": ("pp",),
    "model": ("tp", "pp"),
    "dp_cp": ("dp", "cp"),
    "tp_cp": ("tp", "cp"),
    "tp_dp": ("tp", "dp"),
    "tp_dp_cp": ("tp", "dp", "cp"),
    "world": ("tp", "dp", "cp", "pp"),
    "alone": (),
}
# Experts lie on a grid of their own, where what was data and context is expert and data.
_EXPERT_AXES_OF: Mapping[Kind, tuple[str, ...]] = {
    "ep": ("ep",),
    "expert_dp": ("dp",),
    "expert_tp": ("tp",),
    "expert_tp_ep": ("tp", "ep"),
    "expert_tp_ep_pp": ("tp", "ep", "pp"),
}


@dataclass(frozen=True)
class GroupPlan:
    """The groups of a whole world. A few integers until groups are asked for. Immutable."""

    world_size: int
    tensor: int
    pipeline: int
    context: int
    expert: int
    virtual_pipeline: int | None
    split_rank: int | None
    order: tuple[str, ...]  # axes, the fastest first

    @property
    def data(self) -> int:
        return self.world_size // (self.tensor * self.pipeline * self.context)

    @cached_property
    def groups(self) -> Mapping[Kind, tuple[Ranks, ...]]:
        """Every group of a kind, computed when that kind is first asked for."""
        return _Groups(self)

    def group_of(self, rank: int, kind: Kind) -> Ranks:
        """The ranks of the one `kind` group that `rank` belongs to, ascending. O(its size)."""
        self._check(rank, kind)
        ranks = self._group_at(rank, kind)
        if rank not in ranks:
            raise ValueError(
                f"rank {rank} is in no {kind} group: it is stage {self.stage_of(rank)} of {self.pipeline}, "
                f"and its pipeline's {kind} group is {list(ranks)}"
            )
        return ranks

    def index_in(self, rank: int, kind: Kind) -> int:
        """The position of `rank` within its `kind` group."""
        return self.group_of(rank, kind).index(rank)

    def is_member(self, rank: int, kind: Kind) -> bool:
        """Whether `rank` is in a `kind` group: always, but for the embedding kinds."""
        self._check(rank, kind)
        return rank in self._group_at(rank, kind)

    def members_near(self, rank: int, kind: Kind) -> Ranks:
        """The `kind` group in `rank`'s part of the world, whether or not it holds `rank` itself.

        For the embedding kinds: the ranks of `rank`'s own pipeline that hold that embedding.
        """
        self._check(rank, kind)
        return self._group_at(rank, kind)

    def stage_of(self, rank: int) -> int:
        """The pipeline stage of `rank`."""
        self._check(rank, "pp")
        return self._dense.coordinate(rank, "pp")

    def describe(self, *, max_groups: int = 32) -> str:
        """The groups in words, as a lesson on Megatron prints them."""
        from tpkernels.topology.draw import describe

        return describe(self, max_groups=max_groups)

    def to_svg(self, *, gpus_per_node: int = 8, max_nodes: int = 16) -> str:
        """The groups as a picture: nodes of GPUs, a panel for each kind, a colour for each group."""
        from tpkernels.topology.svg import to_svg

        return to_svg(self, gpus_per_node=gpus_per_node, max_nodes=max_nodes)

    @cached_property
    def _dense(self) -> Grid:
        sizes = {"tp": self.tensor, "cp": self.context, "dp": self.data, "pp": self.pipeline}
        return Grid({axis: sizes[axis] for axis in self.order if axis in sizes})

    @cached_property
    def _experts(self) -> Grid:
        data = self.world_size // (self.tensor * self.expert * self.pipeline)
        sizes = {"tp": self.tensor, "ep": self.expert, "dp": data, "pp": self.pipeline}
        return Grid({axis: sizes[axis] for axis in self.order if axis in sizes})

    def _along(self, kind: Kind) -> tuple[Grid, tuple[str, ...]]:
        if kind in _AXES_OF:
            return self._dense, _AXES_OF[kind]
        if self.expert > 1:
            return self._experts, _EXPERT_AXES_OF[kind]
        if kind == "expert_dp":
            return self._dense, _AXES_OF["dp_cp"]
        return self._dense, tuple(axis for axis in _EXPERT_AXES_OF[kind] if axis != "ep")

    def _embedding_stages(self, kind: Kind) -> list[int]:
        stages = {0} if kind == "position_embedding" else {0, self.pipeline - 1}
        return sorted(stages if self.split_rank is None else stages | {self.split_rank})

    def _group_at(self, rank: int, kind: Kind) -> Ranks:
        if kind in ("embedding", "position_embedding"):
            pipeline = self._dense.group_of(rank, ("pp",))
            return tuple(pipeline[stage] for stage in self._embedding_stages(kind))
        grid, axes = self._along(kind)
        return grid.group_of(rank, axes)

    def first_groups(self, kind: Kind, count: int) -> list[Ranks]:
        """As many of a kind's groups, without listing the others."""
        return list(islice(self._each_group(kind), count))

    def count_groups(self, kind: Kind) -> int:
        per_group = self.pipeline if "embedding" in kind else len(self.group_of(0, kind))
        return self.world_size // per_group

    def _each_group(self, kind: Kind) -> Iterator[Ranks]:
        if kind in ("embedding", "position_embedding"):
            stages = self._embedding_stages(kind)
            return (tuple(ranks[stage] for stage in stages) for ranks in self._each_group("pp"))
        grid, axes = self._along(kind)
        return grid.groups(axes)

    def _check(self, rank: int, kind: Kind) -> None:
        if kind not in (*KINDS, *COMBINED_KINDS):
            raise ValueError(f"unknown kind of group {kind!r}; known are {', '.join(KINDS)}")
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not in this world: expected 0 to {self.world_size - 1}")


class _Groups(Mapping[Kind, tuple[Ranks, ...]]):
    def __init__(self, plan: GroupPlan) -> None:
        self._plan = plan
        self._known: dict[Kind, tuple[Ranks, ...]] = {}

    def __getitem__(self, kind: Kind) -> tuple[Ranks, ...]:
        if kind not in (*KINDS, *COMBINED_KINDS):
            raise KeyError(f"unknown kind of group {kind!r}; known are {', '.join(KINDS)}")
        if kind not in self._known:
            self._known[kind] = tuple(self._plan._each_group(kind))
        return self._known[kind]

    def __iter__(self) -> Iterator[Kind]:
        return iter(KINDS)

    def __len__(self) -> int:
        return len(KINDS)


def plan_groups(
    *,
    world_size: int,
    tensor: int = 1,
    pipeline: int = 1,
    context: int = 1,
    expert: int = 1,
    virtual_pipeline: int | None = None,
    split_rank: int | None = None,
    order: str = check.DEFAULT_ORDER,
) -> GroupPlan:
    """Lay `world_size` ranks on a grid; the first axis of `order` varies fastest.

    Data parallelism takes what the other sizes leave. Experts are spread over data and context ranks, as
    in Megatron-Core, so `expert` must divide world_size / (tensor x pipeline).
    """
    world_size = check.positive(world_size, "world_size")
    tensor = check.positive(tensor, "tensor_model_parallel_size")
    pipeline = check.positive(pipeline, "pipeline_model_parallel_size")
    context = check.positive(context, "context_parallel_size")
    expert = check.positive(expert, "expert_model_parallel_size")
    data = check.data_parallel_size(world_size, tensor=tensor, pipeline=pipeline, context=context)
    check.check_expert(world_size, tensor=tensor, pipeline=pipeline, expert=expert)
    sizes = {"tp": tensor, "cp": context, "ep": expert, "dp": data, "pp": pipeline}
    plan = GroupPlan(
        world_size=world_size,
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        expert=expert,
        virtual_pipeline=check.check_virtual(virtual_pipeline, pipeline),
        split_rank=check.check_split(split_rank, pipeline),
        order=check.parse_order(order, sizes),
    )
    for axis in ("tp", "pp") if expert > 1 else ():
        if sizes[axis] > 1 and plan._dense.strides[axis] != plan._experts.strides[axis]:
            raise check.InvalidSizes(
                f"order {order!r} would give experts other {axis} groups than the rest of the model "
                f"(context {context}, expert {expert}); name 'tp' first and 'pp' last, as in "
                f"{check.DEFAULT_ORDER!r}"
            )
    return plan
