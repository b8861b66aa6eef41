"""Plans the groups of ranks by arithmetic, without torch and process groups.

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

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from tpkernels.groups import draw
from tpkernels.groups import sizes as check
from tpkernels.groups.kinds import COMBINED_KINDS as COMBINED_KINDS
from tpkernels.groups.kinds import KINDS as KINDS
from tpkernels.groups.kinds import GroupKind as GroupKind
from tpkernels.groups.kinds import Groups, Ranks


@dataclass(frozen=True)
class GroupPlan(Groups):
    """An immutable plan of the groups of a world, with methods to describe and draw it."""

    def describe(self, *, max_groups: int = 32, unit: draw.Unit = "GPU") -> str:
        """Describe the groups in words, in the style of Megatron's documentation."""
        return draw.describe(self, max_groups=max_groups, unit=unit)

    def to_svg(self, *, gpus_per_node: int = 8, max_nodes: int = 16, unit: draw.Unit = "GPU") -> str:
        """Draw the groups as SVG: a panel for each kind, nodes of GPUs, a colour for each group."""
        return draw.to_svg(self, gpus_per_node=gpus_per_node, max_nodes=max_nodes, unit=unit)


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
    """Plan the groups of `world_size` ranks on a grid; the first axis in `order` varies fastest.

    The data-parallel size is world_size / (tensor x pipeline x context). Experts are spread over data and
    context ranks, as in Megatron-Core, so `expert` must divide world_size / (tensor x pipeline).
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


@dataclass(frozen=True)
class ListedPlan(GroupPlan):
    """A plan of groups given as lists, by Megatron or by a caller with its own grids.

    lists: returns the groups of a kind; they may leave out ranks of the world
    """

    lists: Callable[[GroupKind], Sequence[Sequence[int]]] = field(compare=False)

    @property
    def data(self) -> int:
        return len(self.groups["dp"][0])

    def stage_of(self, rank: int) -> int:
        return self._group_at(rank, "pp").index(rank)

    def count_groups(self, kind: GroupKind) -> int:
        return len(self.groups[kind])

    def _each_group(self, kind: GroupKind) -> Iterator[Ranks]:
        return (tuple(sorted(ranks)) for ranks in self.lists(kind))  # as torch sorts them

    def _group_at(self, rank: int, kind: GroupKind) -> Ranks:
        listed = self.groups[kind]
        for ranks in listed:
            if rank in ranks:
                return ranks
        if "embedding" in kind and not listed:
            return ()
        if "embedding" in kind:  # the group of the rank's own pipeline
            pipeline = set(self._group_at(rank, "pp"))
            return next((ranks for ranks in listed if not pipeline.isdisjoint(ranks)), ())
        raise ValueError(f"rank {rank} is in none of the {kind} groups that were listed")
