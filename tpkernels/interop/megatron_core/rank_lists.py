"""The groups that Megatron-Core makes for given sizes, as lists of ranks, over the strides of `Grid`.

Dense layers and experts have two grids with the same pipelines. tpkernels' layers use the kinds of a plan;
only Megatron's optimizers and attention use `further_groups`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from tpkernels.groups import sizes as check
from tpkernels.groups.initialize import Listed
from tpkernels.groups.kinds import DENSE_AXES, EXPERT_AXES, Grid, GroupKind
from tpkernels.groups.plan import ListedPlan
from tpkernels.groups.sizes import InvalidSizes

EmbeddingRanks = Callable[[list[int]], Sequence[int]] | None
Lists = list[list[int]]

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


def hierarchy(ranks: Sequence[int], sizes: Sequence[int]) -> list[Lists]:
    """Return the groups of each level: first of neighbours, then of ranks sizes[0] apart, and so on."""
    if prod(sizes) != len(ranks):
        raise InvalidSizes(f"expected sizes whose product is {len(ranks)}, got {list(sizes)}")
    grid = Grid({str(level): size for level, size in enumerate(sizes)})
    return [[[ranks[at] for at in group] for group in grid.groups([axis])] for axis in grid.sizes]


def hybrid_sizes(ranks: int) -> list[int]:
    """The sizes of hybrid data and context groups: powers of two, from 2 to below the number of ranks."""
    return [2**power for power in range(1, ranks.bit_length() - 1)]


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
    def dense(self) -> Grid:
        """The grid of the dense layers."""
        return self._grid(self.tensor, self.context, 1)

    @cached_property
    def experts(self) -> Grid:
        """The grid of the experts."""
        return self._grid(self.expert_tensor, 1, self.expert)

    def _grid(self, tensor: int, context: int, expert: int) -> Grid:
        data = self.world_size // (tensor * context * expert * self.pipeline)
        sizes = {"tp": tensor, "cp": context, "ep": expert, "dp": data, "pp": self.pipeline}
        return Grid({axis: sizes[axis] for axis in check.parse_order(self.order, sizes)})

    def lists(self, kind: GroupKind) -> Lists:
        """Every group of a kind."""
        if kind in DENSE_AXES:
            return [list(ranks) for ranks in self.dense.groups(DENSE_AXES[kind])]
        if kind in EXPERT_AXES:
            return [list(ranks) for ranks in self.experts.groups(EXPERT_AXES[kind])]
        if kind == "embedding":
            choose = self.embedding or (lambda ranks: list(dict.fromkeys((ranks[0], ranks[-1]))))
        else:
            choose = self.position_embedding or (lambda ranks: ranks[:1])
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
        dense, experts = self.dense, self.experts
        other_data = self.pipeline > 1 and dense.sizes["dp"] != experts.sizes["dp"]
        other_pipelines = list(dense.groups(["pp"])) != list(experts.groups(["pp"]))
        if other_pipelines or (other_data and not self.order.endswith("pp")):
            raise InvalidSizes(
                f"order {self.order!r} gives experts other pipelines, or stages of another size, than the "
                "dense layers; name 'pp' last"
            )
        data = dense.sizes["dp"] * self.context
        for size, name in ((data, "data x context"), (experts.sizes["dp"], "expert data")):
            if size % self.instances:
                raise InvalidSizes(
                    f"num_distributed_optimizer_instances: expected a divisor of the {size} {name} ranks, "
                    f"got {self.instances}"
                )
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
            order=tuple(dense.sizes),
            lists=self.lists,
        )

    def further_groups(self, options: Mapping[str, Any], gloo: Sequence[str]) -> dict[str, Listed]:
        """Return groups of no kind in the plan, by name.

        options: of the backend, by Megatron's names of groups
        gloo: the names in GLOO_TWINS that need a twin
        """
        found: dict[str, Lists] = {}
        data = self.lists("dp_cp")
        if self.instances > 1:
            found["intra_dp_cp"] = _neighbours(data, len(data[0]) // self.instances)
            by_instance = self.experts.sizes["dp"] // self.instances
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
            found |= {f"hybrid_{size}": _neighbours(data, size) for size in hybrid_sizes(len(data[0]))}
        if self.all_gather_twin:
            found["dp_cp_all_gather"] = data
        listed = {name: Listed(lists, options=_of(options, name)) for name, lists in found.items()}
        # an optimizer of one instance uses the twins of dp_cp and expert_dp
        kinds: dict[str, GroupKind] = {"dp": "dp", "dp_cp": "dp_cp", "expert_dp": "expert_dp"}
        for name in gloo:
            if name in found or name in kinds:
                lists = found[name] if name in found else self.lists(kinds[name])
                listed[f"{name}_gloo"] = Listed(lists, "gloo")
        return listed


def _neighbours(lists: Lists, size: int) -> Lists:
    """Split each group into groups of `size` neighbours."""
    return [ranks[i : i + size] for ranks in lists for i in range(0, len(ranks), size)]


def _of(options: Mapping[str, Any], name: str) -> Any:
    return options.get(OPTION_NAMES.get(name, name.partition("_")[0] if name.startswith("hcp") else name))
