"""Where each gradient lies: tensors to buckets and offsets. csrc/bucket_layout.cpp in Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_LARGEST = 2**63 - 1  # what C++ counts with


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
    numels: Sequence[int],
    kinds: Sequence[int],
    element_bytes: Sequence[int],
    rules: LayoutRules,
    *,
    native: bool,
) -> BucketLayout:
    """Fill buckets with tensors, given in the order in which they become ready.

    kinds: tensors of different kinds never share a bucket
    native: let the C++ extension do it
    """
    if native:
        layout = torch.ops.tpkernels.bucket_layout(
            numels,
            kinds,
            element_bytes,
            bucket_bytes=rules.bucket_bytes,
            first_bucket_bytes=rules.first_bucket_bytes,
            alignment=rules.alignment,
            padding=rules.padding,
        )
        return BucketLayout(*layout)
    return _lay_out(numels, kinds, element_bytes, rules)


def _lay_out(
    numels: Sequence[int], kinds: Sequence[int], element_bytes: Sequence[int], rules: LayoutRules
) -> BucketLayout:
    _check(numels, kinds, element_bytes, rules)
    bucket_of: list[int] = []
    offset_of: list[int] = []
    elements: list[int] = []
    open_bucket: dict[int, tuple[int, int]] = {}  # by kind: its number, and the bytes that it may grow to
    for numel, kind, width in zip(numels, kinds, element_bytes, strict=True):
        size = _round_up(numel, rules.alignment)
        if size * width > _LARGEST:
            raise ValueError(
                f"bucket_layout: tensor {len(bucket_of)}: expected a size in bytes of at most 63 bits, "
                f"got {numel} elements of {width}"
            )
        number, capacity = open_bucket.get(kind, (-1, 0))
        if number < 0 or (elements[number] + size) * width > capacity:
            capacity = rules.bucket_bytes
            if number < 0:
                capacity = min(capacity, rules.first_bucket_bytes)
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
    for bucket in order:
        if _round_up(elements[bucket], rules.padding) > _LARGEST:
            raise ValueError(
                f"bucket_layout: expected buckets of at most 63 bits, got {elements[bucket]} elements "
                f"padded to a multiple of {rules.padding}"
            )
    return BucketLayout(
        [number_of[bucket] for bucket in bucket_of],
        offset_of,
        [_round_up(elements[bucket], rules.padding) for bucket in order],
    )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _check(
    numels: Sequence[int], kinds: Sequence[int], element_bytes: Sequence[int], rules: LayoutRules
) -> None:
    if not len(numels) == len(kinds) == len(element_bytes):
        raise ValueError(
            f"bucket_layout: expected one kind and one element size for each of {len(numels)} tensors, "
            f"got {len(kinds)} and {len(element_bytes)}"
        )
    if min(rules.bucket_bytes, rules.first_bucket_bytes) < 1:
        raise ValueError(
            "bucket_layout: expected bucket sizes of at least one byte, "
            f"got {rules.bucket_bytes} and {rules.first_bucket_bytes}"
        )
    if min(rules.alignment, rules.padding) < 1:
        raise ValueError(
            "bucket_layout: expected an alignment and a padding of at least one element, "
            f"got {rules.alignment} and {rules.padding}"
        )
    for tensor, (numel, width) in enumerate(zip(numels, element_bytes, strict=True)):
        if numel < 0 or width < 1:
            raise ValueError(
                f"bucket_layout: tensor {tensor}: expected no less than 0 elements of at least one byte, "
                f"got {numel} elements of {width}"
            )
