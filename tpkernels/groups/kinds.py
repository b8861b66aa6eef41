"""Computes the ranks of each group by strides of named axes. Loads the standard library only.

>>> grid = Grid({"tp": 2, "dp": 2, "pp": 2})
>>> grid.coordinate(5, "tp"), grid.coordinate(5, "dp"), grid.coordinate(5, "pp")
(1, 0, 1)
>>> grid.group_of(5, ("pp",))
(1, 5)
>>> list(grid.groups(("tp", "pp")))
[(0, 1, 4, 5), (2, 3, 6, 7)]
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, product
from typing import Literal, get_args

Ranks = tuple[int, ...]
GroupKind = Literal[
    "tp",  # tensor: one layer's weights are split over these ranks
    "cp",  # context: the sequence is split
    "ep",  # expert: the experts are spread
    "dp",  # data: the same weights, other samples
    "pp",  # pipeline: the layers are split
    "model",  # tensor x pipeline: together they hold one full model
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
COMBINED_KINDS: tuple[GroupKind, ...] = get_args(GroupKind)[10:]  # made for Megatron's names only
KINDS: tuple[GroupKind, ...] = get_args(GroupKind)[:10]

DENSE_AXES: Mapping[GroupKind, tuple[str, ...]] = {
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
# Experts have their own grid: expert and data axes in place of data and context.
EXPERT_AXES: Mapping[GroupKind, tuple[str, ...]] = {
    "ep": ("ep",),
    "expert_dp": ("dp",),
    "expert_tp": ("tp",),
    "expert_tp_ep": ("tp", "ep"),
    "expert_tp_ep_pp": ("tp", "ep", "pp"),
}


class Grid:
    """A grid of ranks with named axes: rank = sum of coordinate x stride; the first axis varies fastest."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes = dict(sizes)
        self.strides: dict[str, int] = {}
        stride = 1
        for axis, size in self.sizes.items():
            self.strides[axis] = stride
            stride *= size

    def coordinate(self, rank: int, axis: str) -> int:
        return rank // self.strides[axis] % self.sizes[axis]

    def group_of(self, rank: int, axes: Collection[str]) -> Ranks:
        """Return the ranks that differ from `rank` on `axes` only, with `rank` itself, ascending."""
        origin = rank - sum(self.coordinate(rank, axis) * self.strides[axis] for axis in axes)
        return tuple(origin + offset for offset in self._offsets(axes))

    def groups(self, axes: Collection[str]) -> Iterator[Ranks]:
        """Yield every group along `axes`, by ascending first rank."""
        offsets = list(self._offsets(axes))
        for origin in self._offsets([axis for axis in self.sizes if axis not in axes]):
            yield tuple(origin + offset for offset in offsets)

    def _offsets(self, axes: Collection[str]) -> Iterator[int]:
        # slowest axis first, so that the products come out ascending
        slowest_first = [axis for axis in reversed(self.sizes) if axis in axes]
        spans = [
            range(0, self.sizes[axis] * self.strides[axis], self.strides[axis]) for axis in slowest_first
        ]
        return (sum(parts) for parts in product(*spans))


@dataclass(frozen=True)
class Groups:
    """The groups of a world, computed from its sizes on demand."""

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
    def groups(self) -> Mapping[GroupKind, tuple[Ranks, ...]]:
        """All groups by kind, computed at the first look-up of a kind."""
        return _ByKind(self)

    def group_of(self, rank: int, kind: GroupKind) -> Ranks:
        """Return the ranks of `rank`'s `kind` group, ascending, in time O(size of the group)."""
        self._check(rank, kind)
        ranks = self._group_at(rank, kind)
        if rank not in ranks:
            raise ValueError(
                f"rank {rank} is in no {kind} group: it is stage {self.stage_of(rank)} of {self.pipeline}, "
                f"and its pipeline's {kind} group is {list(ranks)}"
            )
        return ranks

    def index_in(self, rank: int, kind: GroupKind) -> int:
        """Return the position of `rank` within its `kind` group."""
        return self.group_of(rank, kind).index(rank)

    def is_member(self, rank: int, kind: GroupKind) -> bool:
        """Whether `rank` is in a `kind` group: always, except for the embedding kinds."""
        self._check(rank, kind)
        return rank in self._group_at(rank, kind)

    def members_near(self, rank: int, kind: GroupKind) -> Ranks:
        """Return `rank`'s `kind` group; for the embedding kinds its pipeline's group, with or without `rank`.

        Ranks of this group hold that embedding.
        """
        self._check(rank, kind)
        return self._group_at(rank, kind)

    def stage_of(self, rank: int) -> int:
        """Return the pipeline stage of `rank`."""
        self._check(rank, "pp")
        return self._dense.coordinate(rank, "pp")

    @cached_property
    def _dense(self) -> Grid:
        sizes = {"tp": self.tensor, "cp": self.context, "dp": self.data, "pp": self.pipeline}
        return Grid({axis: sizes[axis] for axis in self.order if axis in sizes})

    @cached_property
    def _experts(self) -> Grid:
        data = self.world_size // (self.tensor * self.expert * self.pipeline)
        sizes = {"tp": self.tensor, "ep": self.expert, "dp": data, "pp": self.pipeline}
        return Grid({axis: sizes[axis] for axis in self.order if axis in sizes})

    def _along(self, kind: GroupKind) -> tuple[Grid, tuple[str, ...]]:
        if kind in DENSE_AXES:
            return self._dense, DENSE_AXES[kind]
        if self.expert > 1:
            return self._experts, EXPERT_AXES[kind]
        if kind == "expert_dp":
            return self._dense, DENSE_AXES["dp_cp"]
        return self._dense, tuple(axis for axis in EXPERT_AXES[kind] if axis != "ep")

    def _embedding_stages(self, kind: GroupKind) -> list[int]:
        stages = {0} if kind == "position_embedding" else {0, self.pipeline - 1}
        return sorted(stages if self.split_rank is None else stages | {self.split_rank})

    def _group_at(self, rank: int, kind: GroupKind) -> Ranks:
        if kind in ("embedding", "position_embedding"):
            pipeline = self._dense.group_of(rank, ("pp",))
            return tuple(pipeline[stage] for stage in self._embedding_stages(kind))
        grid, axes = self._along(kind)
        return grid.group_of(rank, axes)

    def first_groups(self, kind: GroupKind, count: int) -> list[Ranks]:
        """Return the first `count` groups of a kind, without computing the others."""
        return list(islice(self._each_group(kind), count))

    def count_groups(self, kind: GroupKind) -> int:
        per_group = self.pipeline if "embedding" in kind else len(self.group_of(0, kind))
        return self.world_size // per_group

    def _each_group(self, kind: GroupKind) -> Iterator[Ranks]:
        if kind in ("embedding", "position_embedding"):
            stages = self._embedding_stages(kind)
            return (tuple(ranks[stage] for stage in stages) for ranks in self._each_group("pp"))
        grid, axes = self._along(kind)
        return grid.groups(axes)

    def _check(self, rank: int, kind: GroupKind) -> None:
        if kind not in (*KINDS, *COMBINED_KINDS):
            raise ValueError(f"unknown kind of group {kind!r}; known are {', '.join(KINDS)}")
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not in this world: expected 0 to {self.world_size - 1}")


class _ByKind(Mapping[GroupKind, tuple[Ranks, ...]]):
    """All groups by kind, computed at the first look-up of a kind."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._known: dict[GroupKind, tuple[Ranks, ...]] = {}

    def __getitem__(self, kind: GroupKind) -> tuple[Ranks, ...]:
        if kind not in (*KINDS, *COMBINED_KINDS):
            raise KeyError(f"unknown kind of group {kind!r}; known are {', '.join(KINDS)}")
        if kind not in self._known:
            self._known[kind] = tuple(self._groups._each_group(kind))
        return self._known[kind]

    def __iter__(self) -> Iterator[GroupKind]:
        return iter(KINDS)

    def __len__(self) -> int:
        return len(KINDS)
