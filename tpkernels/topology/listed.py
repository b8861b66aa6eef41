"""A plan of groups that somebody else has listed, on whatever grids: Megatron's, or a caller's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from tpkernels.topology.groups import Kind, Ranks
from tpkernels.topology.plan import GroupPlan


@dataclass(frozen=True)
class ListedPlan(GroupPlan):
    """The sizes, and for each kind its groups, which may be those of some ranks only."""

    lists: Callable[[Kind], Sequence[Sequence[int]]] = field(compare=False)

    @property
    def data(self) -> int:
        return len(self.groups["dp"][0])

    def stage_of(self, rank: int) -> int:
        return self._group_at(rank, "pp").index(rank)

    def count_groups(self, kind: Kind) -> int:
        return len(self.groups[kind])

    def _each_group(self, kind: Kind) -> Iterator[Ranks]:
        return (tuple(sorted(ranks)) for ranks in self.lists(kind))  # as torch sorts them

    def _group_at(self, rank: int, kind: Kind) -> Ranks:
        listed = self.groups[kind]
        for ranks in listed:
            if rank in ranks:
                return ranks
        if "embedding" in kind and not listed:
            return ()
        if "embedding" in kind:  # that of the rank's own pipeline
            pipeline = set(self._group_at(rank, "pp"))
            return next((ranks for ranks in listed if not pipeline.isdisjoint(ranks)), ())
        raise ValueError(f"rank {rank} is in none of the {kind} groups that were listed")
