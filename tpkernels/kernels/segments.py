"""A product whose depth is split over ranks, with bits that do not depend on how many: see `tp_invariance`.

T tokens, N features; the depth is cut into equal segments s, which are neighbours:

    y_s = Σ over pairs of a_s w_sᵀ, or of a_s w_s    (T, N)    a slot each, in fp32
    y   = Σ over s of y_s, in a tree                 (T, N)    in fp32, to be added to those of other ranks

A segment's product has the bits that it has on a rank with no other segment: form and tile are fixed, and
what a row of operands lies in makes no difference.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tpkernels.kernels import launch
from tpkernels.kernels.dgrad import dgrad
from tpkernels.kernels.linear import linear_fwd
from tpkernels.kernels.reduce import reduce_slots

Pair = tuple[Tensor, Tensor]  # activations (tokens, depth), and a weight (cols, depth) or (depth, cols)
MOST_SLOTS = 8  # at once: a half of more is summed before the other is begun


def segment_sum(pairs: Sequence[Pair], *, transposed: bool, segments: int) -> Tensor:
    """Σ a wᵀ if transposed, else Σ a w, in fp32: of each of so many segments, added in a tree.

    segments: a power of two that divides the depth of each pair
    returns: (tokens, cols)
    """
    if segments < 1 or segments & (segments - 1):
        raise ValueError(f"segment_sum: expected a power of two of segments, got {segments}")
    for a, _ in pairs:
        if a.shape[1] % segments:
            raise ValueError(
                f"segment_sum: expected a depth that {segments} segments divide, got {tuple(a.shape)}"
            )
    (a, w), *_ = pairs
    if segments > MOST_SLOTS:
        halves = (
            segment_sum(_segment(pairs, transposed, half, 2), transposed=transposed, segments=segments // 2)
            for half in range(2)
        )
        return next(halves).add_(next(halves))
    shape = (segments, a.shape[0], w.shape[0 if transposed else 1])
    slots = launch.empty(shape, torch.float32, a.device)
    for segment, slot in enumerate(slots.unbind()):
        _product(_segment(pairs, transposed, segment, segments), transposed, slot)
    return slots[0] if segments == 1 else reduce_slots(slots, tree=True)


def _segment(pairs: Sequence[Pair], transposed: bool, segment: int, segments: int) -> list[Pair]:
    """The operands' views of one of `segments` equal parts of the depth."""
    found = []
    for a, w in pairs:
        width = a.shape[1] // segments
        found.append(
            (
                a.narrow(1, segment * width, width),
                w.narrow(1 if transposed else 0, segment * width, width),
            )
        )
    return found


def _product(pairs: Sequence[Pair], transposed: bool, slot: Tensor) -> None:
    """Two products of gradients at a time in one accumulator; others are added in fp32."""
    (a, w), *others = pairs
    if transposed:
        linear_fwd(a, w, out=slot)
    else:
        dgrad(a, w, *(others.pop(0) if others else ()), out=slot)
    if others:
        beside = launch.empty(tuple(slot.shape), slot.dtype, slot.device)
        _product(others, transposed, beside)
        slot.add_(beside)
