"""Assigns tensors to buckets and offsets. Loads no torch.

>>> lay_out_buckets([1] * 8, ["float32"] * 8, [4] * 8, LayoutRules(100, 4, alignment=1, padding=1)).elements
[1, 1, 2, 2, 1, 1]
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

DEFAULT_BUCKET_BYTES = 25 * 2**20
SMALLEST_BUCKET_BYTES = 2**20  # a smaller collective takes hardly less time
ALIGNMENT = 64  # elements: whole cache lines and 16-byte vectors in every dtype
GATHERED_BYTES = 2**28  # of parameters in flight: else a full model would be in memory twice


@dataclass(frozen=True)
class LayoutRules:
    """Sizes of buckets, in bytes; alignment of tensors and padding of buckets, in elements."""

    bucket_bytes: int
    smallest_bytes: int  # a smaller bucket takes more tensors; equal to `bucket_bytes`: all buckets alike
    alignment: int
    padding: int


@dataclass(frozen=True)
class BucketLayout:
    """The bucket and the offset of each tensor, and the size of each bucket, in elements."""

    bucket_of: list[int]
    offset_of: list[int]
    elements: list[int]


@dataclass
class _OpenBucket:
    """A bucket that still takes tensors. Bytes count its own kind only: ranks may differ in other kinds."""

    number: int
    before: int  # bytes in the buckets before
    size: int = 0  # bytes in this bucket

    def takes(self, size: int, after: int, rules: LayoutRules) -> bool:
        """Whether the next tensor may join, with `after` bytes left after it.

        A bucket is no larger than all buckets before it, nor than all tensors after it. So the first bucket
        is small and starts the link early, and the last is small, because nothing hides it. If the link takes
        half to twice as long as backward, sizes that double from either end add no waits.
        """
        if min(self.size, size + after) < rules.smallest_bytes:  # else it would stay alone
            return self.size + size <= rules.bucket_bytes
        return self.size + size <= min(rules.bucket_bytes, self.before, after)


def lay_out_buckets(
    numels: Sequence[int], kinds: Sequence[Hashable], element_bytes: Sequence[int], rules: LayoutRules
) -> BucketLayout:
    """Assign tensors to buckets in the given order, in which they become ready.

    kinds: tensors of different kinds never share a bucket
    """
    bucket_of: list[int] = []
    offset_of: list[int] = []
    elements: list[int] = []
    aligned = [_round_up(numel, rules.alignment) for numel in numels]
    after: dict[Hashable, int] = defaultdict(int)
    for numel, kind, width in zip(aligned, kinds, element_bytes, strict=True):
        after[kind] += numel * width
    open_buckets: dict[Hashable, _OpenBucket] = {}
    for numel, kind, width in zip(aligned, kinds, element_bytes, strict=True):
        after[kind] -= numel * width
        bucket = open_buckets.get(kind)
        if bucket is None or not bucket.takes(numel * width, after[kind], rules):
            before = 0 if bucket is None else bucket.before + bucket.size
            bucket = open_buckets[kind] = _OpenBucket(len(elements), before)
            elements.append(0)
        bucket_of.append(bucket.number)
        offset_of.append(elements[bucket.number])
        elements[bucket.number] += numel
        bucket.size += numel * width
    # Numbered by their last tensors. Otherwise a bucket that is opened first and filled last (such as a
    # model's norm weights) would hold back all others, since buckets are launched in order.
    last_tensor = {bucket: tensor for tensor, bucket in enumerate(bucket_of)}
    order = sorted(last_tensor, key=last_tensor.__getitem__)
    number_of = {bucket: number for number, bucket in enumerate(order)}
    return BucketLayout(
        [number_of[bucket] for bucket in bucket_of],
        offset_of,
        [_round_up(elements[bucket], rules.padding) for bucket in order],
    )


def runs_within(sizes: Sequence[int], most: int) -> Iterator[range]:
    """Yield runs of neighbours whose sizes sum to at most `most`; a larger item is a run of its own.

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
