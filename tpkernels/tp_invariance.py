"""TP-invariance: the same bits at every tensor-parallel size.

What is split over tensor-parallel ranks is cut into `segments` parts of fixed sizes, of which a rank of R has
segments / R neighbours. Each part is computed as a rank of `segments` ranks would, by the same calls, and
parts are added in one binary tree, first a rank's own, then those of the ranks. So neither a call nor the
order of a sum depends on R. A tree has such subtrees for all R only if `segments` is a power of two.

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
    """Of the process. segments: 0: off; used_by: what was built or computed with it, after which it stays"""

    segments: int = 0
    used_by: str = ""

    @property
    def described(self) -> str:
        """What ranks compare, beside what else they ask for."""
        return f" and {VARIABLE}={self.segments}" if self.segments else ""

    def fix(self, user: str) -> int:
        """The segments, which stay from now on."""
        self.used_by = self.used_by or user
        return self.segments

    def own_segments(self, user: str, ranks: int) -> int:
        """How many parts each of so many ranks has: 0 if the mode is off; an error if they do not divide."""
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
    """From now on compute the same bits at every tensor-parallel size that divides `segments`; 0: do not.

    Called on all ranks alike, before groups and layers are made. They keep what they were made with.
    """
    segments = _checked(segments, "tp_invariant")
    if mode.used_by and segments != mode.segments:
        raise RuntimeError(
            f"tp_invariant({segments}): {mode.used_by} has used {mode.segments} segments already; call it "
            "before groups and layers are made, and before the first op over a group"
        )
    mode.segments = segments


def tree_sum(parts: Iterable[T], add: Callable[[T, T], T] = operator.add) -> T:
    """The sum of a power of two of parts: neighbours first, then neighbours of these sums, and so on.

    Parts may be made one by one: 8 are never there at once, but 4 at most.

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
