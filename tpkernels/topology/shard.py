"""Which rows or columns of a full weight a rank holds: Megatron's split, with strides; and which heads.

A dimension is cut into ranks x stride equal pieces; rank r holds pieces r, r + ranks, r + 2 ranks, ... With
stride 1 that is one run of neighbours. A larger stride keeps together what several weights, stacked in one,
have for the same rank.

>>> pieces_of(1, size=8, ranks=2)
(range(4, 8),)
>>> [row for piece in pieces_of(0, size=8, ranks=2, stride=2) for row in piece]
[0, 1, 4, 5]

Heads of attention are split over ranks, where heads of keys and values may be fewer than ranks.

>>> head_size_of(64, num_heads=8)
8
>>> require_heads(8, num_kv_heads=2, head_size=8, ranks=4)
>>> require_heads(8, num_kv_heads=8, head_size=8, ranks=3)
Traceback (most recent call last):
ValueError: num_heads: expected a multiple of the 3 tensor-parallel ranks, got 8
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
    """The positions in the full dimension that `rank` holds, in the order in which it holds them."""
    length = shard_size(size, ranks, name, stride) // stride
    if not 0 <= rank < ranks:
        raise InvalidSizes(f"rank {rank} is not in the tensor-parallel group: expected 0 to {ranks - 1}")
    return tuple(range(i * length, (i + 1) * length) for i in range(rank, ranks * stride, ranks))


def head_size_of(
    hidden_size: int, num_heads: int, head_size: int | None = None, *, rotary: bool = False
) -> int:
    """Features of a head: `head_size`, or all features divided by the heads; an even number with rotary."""
    if num_heads < 1:
        raise ValueError(f"num_heads: expected at least one head, got {num_heads}")
    if head_size is None:
        if hidden_size % num_heads:
            raise ValueError(
                f"hidden_size: expected a multiple of num_heads {num_heads}, got {hidden_size}; or pass "
                "head_size"
            )
        head_size = hidden_size // num_heads
    if head_size < 1 or (rotary and head_size % 2):
        raise ValueError(
            f"head_size: expected {'an even' if rotary else 'a positive'} number"
            f"{' with rotary, which turns pairs of features' if rotary else ''}, got {head_size}"
        )
    return head_size


def require_heads(num_heads: int, num_kv_heads: int, head_size: int, ranks: int) -> None:
    """Each rank can have as many query heads, and full heads of keys and values or a shard of one."""
    if num_heads % ranks:
        raise ValueError(
            f"num_heads: expected a multiple of the {ranks} tensor-parallel ranks, got {num_heads}"
        )
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"num_kv_heads: expected a divisor of num_heads {num_heads}, got {num_kv_heads}")
    if num_kv_heads % ranks and ranks % num_kv_heads:
        raise ValueError(
            f"num_kv_heads: expected a multiple or a divisor of the {ranks} tensor-parallel ranks, got "
            f"{num_kv_heads}"
        )
    if num_kv_heads * head_size % ranks:
        raise ValueError(
            f"num_kv_heads: expected features that the {ranks} tensor-parallel ranks divide, got "
            f"{num_kv_heads} heads of {head_size}"
        )
