"""TP-invariance: the same bits at every tensor-parallel size.

Dimensions split over R tensor-parallel ranks are divided into `segments` of fixed sizes; each rank has
segments / R neighbouring ones. Each segment is computed by the same calls as on a rank of `segments` ranks.
Partial sums are added in one binary tree, first a rank's own, then those of the ranks. So neither a call nor
the order of a sum depends on R. A tree has such subtrees for all R only if `segments` is a power of two.

TPKERNELS_TP_INVARIANT=8, read when this module is imported, or `tp_invariant(segments=8)` turns it on.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

VARIABLE = "TPKERNELS_TP_INVARIANT"
MOST_SEGMENTS = 1024

T = TypeVar("T", bound=Any)


@dataclass
class Mode:
    """The mode of the process. segments: 0: off; used_by: the first user, which fixes the mode"""

    segments: int = 0
    used_by: str = ""

    @property
    def described(self) -> str:
        """The mode as text, which ranks compare with their requests."""
        return f" and {VARIABLE}={self.segments}" if self.segments else ""

    def fix(self, user: str) -> int:
        """Fix the mode for the rest of the process; return the segments."""
        self.used_by = self.used_by or user
        return self.segments

    def own_segments(self, user: str, ranks: int) -> int:
        """Return the segments of each of `ranks` ranks, or 0 if off; raise if ranks do not divide them."""
        segments = self.fix(user)
        if segments % ranks:
            raise ValueError(
                f"{user}: expected a tensor-parallel size that divides the {segments} segments of "
                f"TP-invariance, got {ranks}; choose 1, 2, 4, ... {segments}, or more segments"
            )
        return segments // ranks


def _checked(segments: object, name: str) -> int:
    if isinstance(segments, bool) or not isinstance(segments, int):
        raise TypeError(f"{name}: expected a whole number, got {segments!r}")
    if segments and not (0 < segments <= MOST_SEGMENTS and segments & (segments - 1) == 0):
        raise ValueError(
            f"{name}: expected 0 (off) or a power of two up to {MOST_SEGMENTS}, got {segments}: no other "
            "number has one order of adding for all sizes that divide it"
        )
    return segments


def _of_environment() -> int:
    value = os.environ.get(VARIABLE, "") or "0"
    if not value.isdecimal():
        raise ValueError(f"{VARIABLE} is {value!r}; expected 0 (off) or a power of two, such as 8")
    return _checked(int(value), VARIABLE)


mode = Mode(_of_environment())


def tp_invariant(segments: int = 8) -> None:
    """Make later results bitwise equal at every tensor-parallel size that divides `segments`; 0: off.

    Called on all ranks alike, before groups and layers are made; these keep their mode.
    """
    segments = _checked(segments, "tp_invariant")
    if mode.used_by and segments != mode.segments:
        raise RuntimeError(
            f"tp_invariant({segments}): {mode.used_by} has used {mode.segments} segments already; call it "
            "before groups and layers are made, and before the first op over a group"
        )
    mode.segments = segments


def tree_sum(parts: Iterable[T], add: Callable[[T, T], T] = operator.add) -> T:
    """Add up a power of two of parts: neighbours first, then neighbouring sums, and so on.

    Parts may be made one by one: of 8 parts at most 4 sums are in memory.

    >>> tree_sum("abcd", lambda one, other: f"({one} {other})")
    '((a b) (c d))'
    """
    waiting: list[T] = []  # sums of 4, 2, 1 parts, say, once there are 7
    for number, part in enumerate(parts, start=1):
        total, pairs = part, number
        while pairs % 2 == 0:
            total, pairs = add(waiting.pop(), total), pairs // 2
        waiting.append(total)
    (total,) = waiting
    return total
