"""TP-invariance for the time of a test, in this process or in a rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tpkernels.tp_invariance import mode


@contextmanager
def tp_invariance(segments: int) -> Iterator[None]:
    """As if the process had begun with so many; what it had built before, others may use again afterwards."""
    before = mode.segments, mode.used_by
    mode.segments, mode.used_by = segments, ""
    try:
        yield
    finally:
        mode.segments, mode.used_by = before
