"""Checks sizes and ranks, and splits dimensions of weights, vocabularies and attention heads over ranks.

A dimension is split into ranks x stride equal ranges; rank r holds ranges r, r + ranks, r + 2 ranks, ...
With stride 1 that is one contiguous range. Stride n is for n weights concatenated in one: each is split.

>>> ranges_of(1, size=8, ranks=2)
(range(4, 8),)
>>> [row for each in ranges_of(0, size=8, ranks=2, stride=2) for row in each]
[0, 1, 4, 5]

A vocabulary need not be a multiple of the ranks: its table is padded. Each rank holds the same number of
rows; rows past the last id are padding, and the last ranks may hold nothing else.

>>> split = split_vocabulary(7, ranks=4)
>>> split.padded_size, split.shard_size
(8, 2)
>>> [list(split.ids_of(rank)) for rank in range(4)]
[[0, 1], [2, 3], [4, 5], [6]]
>>> split_vocabulary(50257, ranks=2, divisible_by=128).padded_size
50432

Heads that ranks do not divide are padded. If a rank would need several heads of keys and values, the query
heads that read one of them get ranks of their own.

>>> [list(split_heads(6, ranks=4).heads_of(rank)) for rank in range(4)]
[[0, 1], [2, 3], [4, 5], []]
>>> [list(split_heads(6, kv_heads=2, ranks=4).heads_of(rank)) for rank in range(4)]
[[0, 1], [2], [3, 4], [5]]

tpkernels' layers need a multiple of the ranks as query heads. There may be fewer heads of keys and values.

>>> head_size_of(64, num_heads=8)
8
>>> require_heads(8, num_kv_heads=2, head_size=8, ranks=4)
>>> require_heads(8, num_kv_heads=8, head_size=8, ranks=3)
Traceback (most recent call last):
ValueError: num_heads: expected a multiple of the 3 tensor-parallel ranks, got 8
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

AXES = ("tp", "cp", "ep", "dp", "pp")
DEFAULT_ORDER = "tp-cp-ep-dp-pp"


class InvalidSizes(ValueError, RuntimeError, AssertionError):
    """The world cannot be split by the given sizes.

    It is a `ValueError`, and also the `RuntimeError` and the `AssertionError` that Megatron's two
    initializers raise for the same mistake, so that existing `except` clauses still work.
    """


def positive(value: int, name: str) -> int:
    """Return `value` as an int of at least 1; raise an error with its name otherwise."""
    return _at_least(1, "a positive integer", value, name)


def not_negative(value: int, name: str) -> int:
    """Return `value` as an int of at least 0, such as a rank; raise an error with its name otherwise."""
    return _at_least(0, "an integer of 0 or more", value, name)


def _at_least(least: int, wanted: str, value: int, name: str) -> int:
    if isinstance(value, bool):
        raise TypeError(f"{name} must be {wanted}, got {value!r}")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be {wanted}, got {value!r}") from None
    if number < least:
        raise InvalidSizes(f"{name} must be {wanted}, got {number}")
    return number


def data_parallel_size(world_size: int, *, tensor: int, pipeline: int, context: int) -> int:
    """Return the data-parallel size: world_size / (tensor x pipeline x context)."""
    parts = f"tensor_model_parallel_size ({tensor}) x pipeline_model_parallel_size ({pipeline})"
    if context > 1:
        parts += f" x context_parallel_size ({context})"
    model = tensor * pipeline * context
    if world_size % model:
        raise InvalidSizes(
            f"world_size ({world_size}) is not divisible by {parts} = {model}; "
            f"choose sizes whose product divides {world_size}"
        )
    return world_size // model


def check_expert(world_size: int, *, tensor: int, pipeline: int, expert: int) -> None:
    model = tensor * pipeline * expert
    if world_size % model:
        raise InvalidSizes(
            f"world_size ({world_size}) is not divisible by tensor_model_parallel_size ({tensor}) x "
            f"pipeline_model_parallel_size ({pipeline}) x expert_model_parallel_size ({expert}) = {model}; "
            f"experts are spread over the data ranks, so {expert} must divide "
            f"{world_size // (tensor * pipeline)}"
        )


def check_virtual(virtual_pipeline: int | None, pipeline: int) -> int | None:
    if virtual_pipeline is None:
        return None
    if pipeline < 2:
        raise InvalidSizes(
            "pipeline-model-parallel size should be greater than 1 with interleaved schedule: "
            f"got pipeline {pipeline} with virtual_pipeline {virtual_pipeline}; "
            "use 2 or more stages, or leave virtual_pipeline out"
        )
    return positive(virtual_pipeline, "virtual_pipeline")


def check_split(split_rank: int | None, pipeline: int) -> int | None:
    if split_rank is None:
        return None
    if isinstance(split_rank, bool) or not hasattr(split_rank, "__index__"):
        raise TypeError(
            f"split_rank must be an integer, got {split_rank!r}: the fourth argument of "
            "initialize_model_parallel is pipeline_model_parallel_split_rank, the decoder's first stage; "
            "in today's Megatron it is pipeline_model_parallel_comm_backend; pass backend=... instead, for "
            "every group"
        )
    if not 0 <= split_rank < pipeline:
        raise InvalidSizes(
            f"split_rank ({split_rank}) is not a pipeline stage: expected 0 to {pipeline - 1} "
            f"with pipeline_model_parallel_size {pipeline}"
        )
    return operator.index(split_rank)


def parse_order(order: str, sizes: dict[str, int]) -> tuple[str, ...]:
    """Parse "tp-cp-ep-dp-pp" into axes, the fastest first; an axis of size 1 may be left out."""
    if not isinstance(order, str):
        raise TypeError(f"order must be a string such as {DEFAULT_ORDER!r}, got {order!r}")
    axes = order.lower().split("-")
    for axis in axes:
        if axis not in AXES:
            raise InvalidSizes(
                f"order {order!r} names an unknown axis {axis!r}; known are {', '.join(AXES)}, "
                f"joined by '-' as in {DEFAULT_ORDER!r}"
            )
        if axes.count(axis) > 1:
            raise InvalidSizes(f"order {order!r} names the axis {axis!r} twice")
    missing = [axis for axis in AXES if axis not in axes]
    for axis in missing:
        if sizes[axis] > 1:
            raise InvalidSizes(
                f"order {order!r} leaves out the axis {axis!r}, whose size is {sizes[axis]}; "
                f"only an axis of size 1 may be left out"
            )
    return (*axes, *missing)


def shard_size(size: int, ranks: int, name: str = "size", stride: int = 1) -> int:
    """Return the size of one rank's shard of a dimension.

    name: of the dimension, for the error if ranks x stride do not divide it
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


def ranges_of(rank: int, *, size: int, ranks: int, stride: int = 1, name: str = "size") -> tuple[range, ...]:
    """Return the ranges of the full dimension that `rank` holds, in the order of its shard."""
    length = shard_size(size, ranks, name, stride) // stride
    if not 0 <= rank < ranks:
        raise InvalidSizes(f"rank {rank} is not in the tensor-parallel group: expected 0 to {ranks - 1}")
    return tuple(range(i * length, (i + 1) * length) for i in range(rank, ranks * stride, ranks))


def stacked_ranges(rank: int, stacks: tuple[int, ...], ranks: int) -> tuple[range, ...]:
    """Return the ranges that `rank` holds of concatenated weights of these sizes, each split over the ranks.

    >>> stacked_ranges(1, (8, 4, 4), ranks=2)
    (range(4, 8), range(10, 12), range(14, 16))
    """
    ranges = []
    start = 0
    for stack in stacks:
        (own,) = ranges_of(rank, size=stack, ranks=ranks)
        ranges.append(range(start + own.start, start + own.stop))
        start += stack
    return tuple(ranges)


@dataclass(frozen=True, slots=True)
class VocabularySplit:
    """A vocabulary of `size` ids, split over `ranks` ranks with `shard_size` rows each."""

    size: int
    ranks: int
    shard_size: int

    @property
    def padded_size(self) -> int:
        """The number of rows of the full table, padding included."""
        return self.shard_size * self.ranks

    def rows_of(self, rank: int) -> range:
        """Return the rows of the full table that `rank` holds, padding included."""
        if not 0 <= rank < self.ranks:
            raise InvalidSizes(
                f"rank {rank} is not in the tensor-parallel group: expected 0 to {self.ranks - 1}"
            )
        return range(rank * self.shard_size, (rank + 1) * self.shard_size)

    def ids_of(self, rank: int) -> range:
        """Return the ids that `rank` holds; none if all of its rows are padding."""
        rows = self.rows_of(rank)
        return range(min(rows.start, self.size), min(rows.stop, self.size))


def split_vocabulary(size: int, *, ranks: int, divisible_by: int = 1) -> VocabularySplit:
    """Pad a vocabulary to a multiple of `divisible_by` x `ranks`, and split it into equal shards.

    divisible_by: each rank's rows are a multiple of it: Megatron's `make_vocab_size_divisible_by`
    """
    size, ranks = positive(size, "vocabulary size"), positive(ranks, "ranks")
    unit = positive(divisible_by, "divisible_by")
    return VocabularySplit(size, ranks, shard_size=-(-size // (ranks * unit)) * unit)


@dataclass(frozen=True, slots=True)
class HeadSplit:
    """Heads split over ranks; each rank has the same number of slots: its own heads, then padding.

    runs: the number of equal runs of heads, each over ranks of its own
    unit: features of a head
    """

    heads: int
    ranks: int
    runs: int = 1
    unit: int = 1

    @property
    def slots(self) -> int:
        return -(-self.heads // self.ranks)

    @property
    def size(self) -> int:
        """The number of features of all heads."""
        return self.heads * self.unit

    @property
    def shard_size(self) -> int:
        """The number of features of a rank, padding included."""
        return self.slots * self.unit

    def heads_of(self, rank: int) -> range:
        run, place = divmod(rank, self.ranks // self.runs)
        length = self.heads // self.runs
        first, end = (run * length + min(slot * self.slots, length) for slot in (place, place + 1))
        return range(first, end)

    def features_of(self, rank: int) -> range:
        heads = self.heads_of(rank)
        return range(heads.start * self.unit, heads.stop * self.unit)


def split_heads(heads: int, *, ranks: int, kv_heads: int | None = None) -> HeadSplit:
    """Split query heads over ranks, so that each rank reads as few heads of keys and values as possible.

    kv_heads: the number of heads of keys and values, a divisor of `heads`; None: the same number
    """
    group = heads // (kv_heads or heads)
    slots = -(-heads // ranks)
    # in order, a rank reads its own heads of keys, or one head, or else one for each of its queries
    in_order = slots % group == 0 or group % slots == 0
    runs = kv_heads if kv_heads and not in_order and ranks % kv_heads == 0 else 1
    return HeadSplit(heads, ranks, runs)


def head_size_of(
    hidden_size: int, num_heads: int, head_size: int | None = None, *, rotary: bool = False
) -> int:
    """Return the features of a head: `head_size`, or hidden_size / num_heads; with rotary it must be even."""
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


def require_heads(
    num_heads: int, num_kv_heads: int, head_size: int, ranks: int, holders: str = "tensor-parallel ranks"
) -> None:
    """Raise unless ranks divide the query heads, and each holds heads of keys and values or shares one.

    holders: the word for `ranks` in errors
    """
    if num_heads % ranks:
        raise ValueError(f"num_heads: expected a multiple of the {ranks} {holders}, got {num_heads}")
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"num_kv_heads: expected a divisor of num_heads {num_heads}, got {num_kv_heads}")
    if num_kv_heads % ranks and ranks % num_kv_heads:
        raise ValueError(
            f"num_kv_heads: expected a multiple or a divisor of the {ranks} {holders}, got {num_kv_heads}"
        )
    if num_kv_heads * head_size % ranks:
        raise ValueError(
            f"num_kv_heads: expected features that the {ranks} {holders} divide, got "
            f"{num_kv_heads} heads of {head_size}"
        )
