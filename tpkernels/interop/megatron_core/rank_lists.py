"""The groups that Megatron-Core makes for given sizes, as lists of ranks, over the strides of `Grid`.

Dense layers and experts have two grids with the same pipelines. tpkernels' layers use the kinds of
`topology.groups.Kind`; only Megatron's optimizers and attention use `further_groups`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from tpkernels.groups import sizes as check
from tpkernels.groups.initialize import Listed
from tpkernels.groups.kinds import Grid, GroupKind
from tpkernels.groups.plan import ListedPlan
from tpkernels.groups.sizes import InvalidSizes

EmbeddingRanks = Callable[[list[int]], Sequence[int]] | None
Lists = list[list[int]]

_DENSE: Mapping[GroupKind, str] = {
    "tp": "tp",
    "cp": "cp",
    "dp": "dp",
    "pp": "pp",
    "model": "tp-pp",
    "dp_cp": "dp-cp",
    "tp_cp": "tp-cp",
    "tp_dp": "tp-dp",
    "tp_dp_cp": "tp-dp-cp",
}
_EXPERTS: Mapping[GroupKind, str] = {
    "ep": "ep",
    "expert_dp": "dp",
    "expert_tp": "tp",
    "expert_tp_ep": "tp-ep",
    "expert_tp_ep_pp": "tp-ep-pp",
}
GLOO_TWINS = ("dp", "dp_cp", "intra_dp_cp", "expert_dp", "intra_expert_dp")
# Megatron's names in its communicator settings, where ours differ.
OPTION_NAMES = {
    "model": "mp",
    "embedding": "embd",
    "position_embedding": "pos_embd",
    "expert_tp": "ep_tp",
    "expert_tp_ep": "tp_ep_mp",
    "expert_tp_ep_pp": "tp_ep_pp",
    "expert_dp": "ep_dp",
    "intra_expert_dp": "intra_ep_dp",
    "inter_dist_opt": "inter_ep_dp",
    "intra_dist_opt": "intra_dist_opt_instance",
    "dp_cp_all_gather": "dp_cp",
}


class RankGenerator:
    """Lists the groups of a world along axes such as "tp" or "tp-dp", for dense layers or for experts."""

    def __init__(
        self,
        tp: int,
        ep: int,
        dp: int,
        pp: int,
        cp: int,
        order: str,
        rank_offset: int = 0,
        gtp_remat: int = 1,
    ) -> None:
        """gtp_remat: must be 1; newer Megatrons pass it"""
        if ep > 1 and cp > 1:
            raise InvalidSizes(f"expected context or expert ranks in one grid, got cp={cp} and ep={ep}")
        if gtp_remat != 1:
            raise InvalidSizes(
                f"gtp_remat: expected 1, because weights are not gathered for each use, got {gtp_remat}"
            )
        self.tp, self.ep, self.dp, self.pp, self.cp = tp, ep, dp, pp, cp
        self.rank_offset = rank_offset
        self.name_to_size = {"tp": tp, "pp": pp, "dp": dp, "ep": ep, "cp": cp}
        self.world_size = prod(self.name_to_size.values())
        named = order.lower().split("-")
        for axis in named:
            if axis not in self.name_to_size or named.count(axis) > 1:
                raise InvalidSizes(f"order: expected each of {list(self.name_to_size)} once, got {order!r}")
        for axis, size in self.name_to_size.items():
            if axis not in named and size > 1:
                raise InvalidSizes(f"order {order!r} leaves out {axis!r}, whose size is {size}")
        axes = [*named, *(axis for axis in self.name_to_size if axis not in named)]
        self.order = "-".join(axes)
        self.ordered_size = [self.name_to_size[axis] for axis in axes]
        self._grid = Grid({axis: self.name_to_size[axis] for axis in axes})

    def get_mask(self, order: str, token: str) -> list[bool]:
        """For each axis of `order`, whether `token` names it."""
        wanted = token.split("-")
        unknown = set(wanted) - set(order.split("-"))
        if unknown:
            raise ValueError(f"token: expected axes of {order!r}, got {token!r}")
        return [axis in wanted for axis in order.split("-")]

    def get_ranks(self, token: str) -> list[list[int]]:
        """Every group along the axes of `token`, such as "tp-dp"."""
        self.get_mask(self.order, token)
        return [[rank + self.rank_offset for rank in ranks] for ranks in self._grid.groups(token.split("-"))]


def generate_masked_orthogonal_rank_groups(
    world_size: int, parallel_size: Sequence[int], mask: Sequence[bool]
) -> list[list[int]]:
    """Every group along the axes that `mask` names, of a grid whose first axis varies fastest."""
    if prod(parallel_size) != world_size or len(mask) != len(parallel_size):
        raise InvalidSizes(
            f"expected a mask for each of the sizes, whose product is world_size {world_size}, got sizes "
            f"{list(parallel_size)} and mask {list(mask)}"
        )
    grid = Grid({str(axis): size for axis, size in enumerate(parallel_size)})
    axes = [str(axis) for axis, wanted in enumerate(mask) if wanted]
    return [list(ranks) for ranks in grid.groups(axes)]


def hierarchy(ranks: Sequence[int], sizes: Sequence[int]) -> list[list[list[int]]]:
    """Return the groups of each level: first of neighbours, then of ranks sizes[0] apart, and so on."""
    if prod(sizes) != len(ranks):
        raise InvalidSizes(f"expected sizes whose product is {len(ranks)}, got {list(sizes)}")
    grid = Grid({str(level): size for level, size in enumerate(sizes)})
    return [[[ranks[at] for at in group] for group in grid.groups([axis])] for axis in grid.sizes]


def hybrid_sizes(ranks: int) -> list[int]:
    """The sizes of hybrid data and context groups: powers of two, from 2 to below the number of ranks."""
    return [2**power for power in range(1, ranks.bit_length() - 1)]


def default_embedding_ranks(pp_ranks: Sequence[int]) -> list[int]:
    """The stages that hold the word embedding: the first and the last."""
    return sorted({pp_ranks[0], pp_ranks[-1]}, key=list(pp_ranks).index)


def default_position_embedding_ranks(pp_ranks: Sequence[int]) -> list[int]:
    """The stages that hold the position embedding: the first."""
    return [pp_ranks[0]]


@dataclass(frozen=True)
class MegatronSizes:
    """The sizes that Megatron is initialized with, and all groups that follow from them."""

    world_size: int
    tensor: int
    pipeline: int
    context: int
    expert: int
    expert_tensor: int
    instances: int  # of the distributed optimizer
    order: str
    embedding: EmbeddingRanks = None
    position_embedding: EmbeddingRanks = None
    hierarchical: Sequence[int] = ()
    hybrid: bool = False
    all_gather_twin: bool = False

    @cached_property
    def dense(self) -> RankGenerator:
        """The grid of the dense layers."""
        data = self.world_size // (self.tensor * self.pipeline * self.context)
        return RankGenerator(self.tensor, 1, data, self.pipeline, self.context, self.order)

    @cached_property
    def experts(self) -> RankGenerator:
        """The grid of the experts."""
        data = self.world_size // (self.expert_tensor * self.expert * self.pipeline)
        return RankGenerator(self.expert_tensor, self.expert, data, self.pipeline, 1, self.order)

    def lists(self, kind: GroupKind) -> Lists:
        """Every group of a kind."""
        if kind in _DENSE:
            return self.dense.get_ranks(_DENSE[kind])
        if kind in _EXPERTS:
            return self.experts.get_ranks(_EXPERTS[kind])
        if kind == "world":
            return [list(range(self.world_size))]
        if kind == "alone":
            return [[rank] for rank in range(self.world_size)]
        choose: EmbeddingRanks = {
            "embedding": self.embedding or default_embedding_ranks,
            "position_embedding": self.position_embedding or default_position_embedding_ranks,
        }[kind]
        assert choose is not None
        return [list(choose(ranks)) for ranks in self.lists("pp")]

    def checked(self, virtual_pipeline: int | None) -> ListedPlan:
        """Return the plan of these groups; raise if the sizes do not fit."""
        check.data_parallel_size(
            self.world_size, tensor=self.tensor, pipeline=self.pipeline, context=self.context
        )
        each = self.expert_tensor * self.expert * self.pipeline
        if self.world_size % each:
            raise InvalidSizes(
                f"world_size ({self.world_size}) is not divisible by expert_tensor_parallel_size "
                f"({self.expert_tensor}) x expert_model_parallel_size ({self.expert}) x "
                f"pipeline_model_parallel_size ({self.pipeline}) = {each}"
            )
        other_data = self.pipeline > 1 and self.dense.dp != self.experts.dp
        pipelines = [grid.get_ranks("pp") for grid in (self.dense, self.experts)]
        if pipelines[0] != pipelines[1] or (other_data and not self.order.endswith("pp")):
            raise InvalidSizes(
                f"order {self.order!r} gives experts other pipelines, or stages of another size, than the "
                "dense layers; name 'pp' last"
            )
        for size, name in (
            (self.dense.dp * self.context, "data x context"),
            (self.experts.dp, "expert data"),
        ):
            if size % self.instances:
                raise InvalidSizes(
                    f"num_distributed_optimizer_instances: expected a divisor of the {size} {name} ranks, "
                    f"got {self.instances}"
                )
        data = self.dense.dp * self.context
        if self.hybrid and data % max([2, *hybrid_sizes(data)]):
            raise InvalidSizes(
                "hybrid_context_parallel: expected data x context ranks that the powers of two below their "
                f"number divide, got {data}"
            )
        return ListedPlan(
            world_size=self.world_size,
            tensor=self.tensor,
            pipeline=self.pipeline,
            context=self.context,
            expert=self.expert,
            virtual_pipeline=check.check_virtual(virtual_pipeline, self.pipeline),
            split_rank=None,
            order=tuple(self.dense.order.split("-")),
            lists=self.lists,
        )

    def further_groups(self, options: Mapping[str, Any], gloo: Sequence[str]) -> dict[str, Listed]:
        """Return groups of no kind in the plan, by name.

        options: of the backend, by Megatron's names of groups
        gloo: the names in GLOO_TWINS that need a twin
        """
        found: dict[str, Lists] = {}
        if self.instances > 1:
            data = self.lists("dp_cp")
            intra = len(data[0]) // self.instances
            found["intra_dp_cp"] = [
                ranks[i : i + intra] for ranks in data for i in range(0, len(ranks), intra)
            ]
            by_instance = self.experts.dp // self.instances
            levels = [hierarchy(ranks, (by_instance, self.instances)) for ranks in self.lists("expert_dp")]
            found["intra_expert_dp"] = [ranks for level in levels for ranks in level[0]]
            found["inter_dist_opt"] = [ranks for level in levels for ranks in level[1]]
            models = self.lists("expert_tp_ep_pp")
            found["intra_dist_opt"] = [
                [rank for model in models[i : i + by_instance] for rank in model]
                for i in range(0, len(models), by_instance)
            ]
        if self.hierarchical:
            chains = [hierarchy(ranks, self.hierarchical) for ranks in self.lists("cp")]
            for level in range(len(self.hierarchical)):
                found[f"hcp_{level}"] = [ranks for chain in chains for ranks in chain[level]]
        if self.hybrid:
            data = self.lists("dp_cp")
            for size in hybrid_sizes(len(data[0])):
                found[f"hybrid_{size}"] = [r[i : i + size] for r in data for i in range(0, len(r), size)]
        if self.all_gather_twin:
            found["dp_cp_all_gather"] = self.lists("dp_cp")
        listed = {name: Listed(lists, options=_of(options, name)) for name, lists in found.items()}
        for name in gloo:
            # an optimizer of one instance uses the twins of dp_cp and expert_dp
            kinds: dict[str, GroupKind] = {"dp": "dp", "dp_cp": "dp_cp", "expert_dp": "expert_dp"}
            if name in found or name in kinds:
                lists = found[name] if name in found else self.lists(kinds[name])
                listed[f"{name}_gloo"] = Listed(lists, "gloo")
        return listed


def _of(options: Mapping[str, Any], name: str) -> Any:
    return options.get(OPTION_NAMES.get(name, name.partition("_")[0] if name.startswith("hcp") else name))
