"""TP-invariance for the time of a test, in this process or in a rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import tpkernels.tp_invariance
from tpkernels.tp_invariance import OpInSegments, tp_invariant


@contextmanager
def tp_invariance(segments: int) -> Iterator[None]:
    """Layers that are built meanwhile, and ops without a layer, have so many segments."""
    before = tpkernels.tp_invariance.default.segments
    tp_invariant(segments)
    try:
        yield
    finally:
        tp_invariant(before)


def in_op(segments: int) -> OpInSegments:
    """Kernels that are called meanwhile are those of an op with so many segments."""
    return OpInSegments(segments, nullcontext())
