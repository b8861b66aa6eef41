"""Ranks on a grid of named axes, by strides alone.

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
from itertools import product

Ranks = tuple[int, ...]


class Grid:
    """Rank = sum of coordinate x stride; the first axis varies fastest."""

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
        """`rank` and the ranks that differ from it on `axes` only, ascending."""
        origin = rank - sum(self.coordinate(rank, axis) * self.strides[axis] for axis in axes)
        return tuple(origin + offset for offset in self._offsets(axes))

    def groups(self, axes: Collection[str]) -> Iterator[Ranks]:
        """Every group along `axes`, by ascending first rank."""
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
