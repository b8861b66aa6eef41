"""Which rows or columns of a whole weight a rank holds: Megatron's split, with strides.

A dimension is cut into ranks x stride equal pieces; rank r holds pieces r, r + ranks, r + 2 ranks, ... With
stride 1 that is one run of neighbours. A larger stride keeps together what several weights, stacked in one,
have for the same rank.

>>> pieces_of(1, size=8, ranks=2)
(range(4, 8),)
>>> [row for piece in pieces_of(0, size=8, ranks=2, stride=2) for row in piece]
[0, 1, 4, 5]
"""

from __future__ import annotations

from tpkernels.topology.sizes import InvalidSizes, positive


def shard_size(size: int, ranks: int, name: str = "size", stride: int = 1) -> int:
    """How much of a dimension each rank holds.

    name: of the dimension, for the error where ranks x stride do not divide it
    """
    size, ranks, stride = positive(size, name), positive(ranks, "ranks"), positive(stride, "stride")
    if size % (ranks * stride):
        parts = f"{ranks} ranks of the tensor-parallel group"
        if stride > 1:
            parts += f" x stride ({stride}) = {ranks * stride}"
        raise InvalidSizes(
            f"{name} ({size}) is not divisible by the {parts}; choose a multiple of {ranks * stride}"
        )
    return size // ranks


def pieces_of(rank: int, *, size: int, ranks: int, stride: int = 1, name: str = "size") -> tuple[range, ...]:
    """The positions in the whole dimension that `rank` holds, in the order in which it holds them."""
    length = shard_size(size, ranks, name, stride) // stride
    if not 0 <= rank < ranks:
        raise InvalidSizes(f"rank {rank} is not in the tensor-parallel group: expected 0 to {ranks - 1}")
    return tuple(range(i * length, (i + 1) * length) for i in range(rank, ranks * stride, ranks))
