"""How large buckets are, and where each tensor lies: tensors to buckets and offsets. Loads no torch.

>>> lay_out_buckets([60, 40, 1], ["float32"] * 3, [4] * 3, LayoutRules(400, 400, alignment=1, padding=8))
BucketLayout(bucket_of=[0, 0, 1], offset_of=[0, 60, 0], elements=[104, 8])
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

DEFAULT_BUCKET_BYTES = 25 * 2**20
FIRST_BUCKET_BYTES = 2**20  # small, so that communication starts early
ALIGNMENT = 64  # elements: whole cache lines and 16-byte vectors in every dtype
GATHERED_BYTES = 2**28  # of parameters in flight: whole models would be there twice


@dataclass(frozen=True)
class LayoutRules:
    """How large buckets grow, in bytes, and where tensors start and buckets end, in elements."""

    bucket_bytes: int
    first_bucket_bytes: int  # of the first bucket of each kind: communication starts early
    alignment: int
    padding: int


@dataclass(frozen=True)
class BucketLayout:
    """`bucket_of` and `offset_of` by tensor, `elements` by bucket. Offsets are in elements."""

    bucket_of: list[int]
    offset_of: list[int]
    elements: list[int]


def lay_out_buckets(
    numels: Sequence[int], kinds: Sequence[Hashable], element_bytes: Sequence[int], rules: LayoutRules
) -> BucketLayout:
    """Fill buckets with tensors, given in the order in which they become ready.

    kinds: tensors of different kinds never share a bucket
    """
    bucket_of: list[int] = []
    offset_of: list[int] = []
    elements: list[int] = []
    open_bucket: dict[Hashable, tuple[int, int]] = {}  # by kind: its number, and most bytes
    for numel, kind, width in zip(numels, kinds, element_bytes, strict=True):
        size = _round_up(numel, rules.alignment)
        number, capacity = open_bucket.get(kind, (-1, 0))
        if number < 0 or (elements[number] + size) * width > capacity:
            capacity = (
                rules.bucket_bytes if number >= 0 else min(rules.bucket_bytes, rules.first_bucket_bytes)
            )
            number = len(elements)
            open_bucket[kind] = number, capacity
            elements.append(0)
        bucket_of.append(number)
        offset_of.append(elements[number])
        elements[number] += size
    # Numbered by their last tensors. Otherwise a bucket that is opened first and filled last (the norm
    # weights of a whole model, say) would hold back all others, since buckets are launched in order.
    last_tensor = {bucket: tensor for tensor, bucket in enumerate(bucket_of)}
    order = sorted(last_tensor, key=last_tensor.__getitem__)
    number_of = {bucket: number for number, bucket in enumerate(order)}
    return BucketLayout(
        [number_of[bucket] for bucket in bucket_of],
        offset_of,
        [_round_up(elements[bucket], rules.padding) for bucket in order],
    )


def runs_within(sizes: Sequence[int], most: int) -> Iterator[range]:
    """Neighbours that are at most so large together, or one that is larger by itself.

    >>> list(runs_within([3, 4, 9, 1], most=7))
    [range(0, 2), range(2, 3), range(3, 4)]
    """
    start = total = 0
    for index, size in enumerate(sizes):
        if index > start and total + size > most:
            yield range(start, index)
            start, total = index, 0
        total += size
    if sizes:
        yield range(start, len(sizes))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
