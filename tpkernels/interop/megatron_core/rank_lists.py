"""Megatron's rank arithmetic by its names, over the strides of `topology.groups.Grid`."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from tpkernels.topology.groups import Grid
from tpkernels.topology.sizes import InvalidSizes


class RankGenerator:
    """The groups of a world along axes such as "tp" or "tp-dp": of its dense layers, or of its experts."""

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
        """gtp_remat: 1, as newer Megatrons pass it"""
        if ep > 1 and cp > 1:
            raise InvalidSizes(f"expected context or expert ranks in one grid, got cp={cp} and ep={ep}")
        if gtp_remat != 1:
            raise InvalidSizes(
                f"gtp_remat: expected 1, for weights are not gathered for each use, got {gtp_remat}"
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
    """For each level its groups: first of neighbours, then of what lies sizes[0] apart, and so on."""
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
