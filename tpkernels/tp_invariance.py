"""TP-invariance: the same bits at every tensor-parallel size.

Dimensions split over R tensor-parallel ranks are divided into `segments` of fixed sizes; each rank has
segments / R neighbouring ones. Each segment is computed by the same calls as on a rank of `segments` ranks.
Partial sums are added in one binary tree, first a rank's own, then those of the ranks. So neither a call nor
the order of a sum depends on R. A tree has such subtrees for all R only if `segments` is a power of two.

A layer is built with a number of segments, which it keeps. `tp_invariant(segments=8)`, or
TPKERNELS_TP_INVARIANT=8 when this module is imported, says with how many layers are built from then on; an op
that is called without a layer takes the same number. While an op runs, kernels ask `segments_of_op`.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

VARIABLE = "TPKERNELS_TP_INVARIANT"
MOST_SEGMENTS = 1024

T = TypeVar("T", bound=Any)


def checked(segments: object, name: str) -> int:
    """Return segments that were asked for as `name`; raise if they are no number of segments."""
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
    return checked(int(value), VARIABLE)


@dataclass
class Default:
    """With how many segments layers are built, and ops without a layer compute; 0: without TP-invariance."""

    segments: int


default = Default(_of_environment())


def tp_invariant(segments: int = 8) -> None:
    """Make results of layers built from now on bitwise equal at every tensor-parallel size.

    Layers keep the segments that they were built with. Called on all ranks alike.

    segments: a power of two, which all these sizes divide; 0: off
    """
    default.segments = checked(segments, "tp_invariant")


def given_or_default(segments: int | None, name: str = "tp_invariant") -> int:
    """Return the segments that were asked for; None asks for the default."""
    return default.segments if segments is None else checked(segments, name)


def own_segments(user: str, segments: int, ranks: int) -> int:
    """Return the segments of each of `ranks` ranks, or 0 without them; raise if ranks do not divide them."""
    if segments % ranks:
        raise ValueError(
            f"{user}: expected a tensor-parallel size that divides the {segments} segments of "
            f"TP-invariance, got {ranks}; choose 1, 2, 4, ... {segments}, or more segments"
        )
    return segments // ranks


_of_op: ContextVar[int] = ContextVar("segments of the op that runs", default=0)
segments_of_op = _of_op.get  # which no kernel is given: it would be an argument of each of them


class OpInSegments:
    """While entered, kernels choose tiles and forms as at every tensor-parallel size; ops do not nest."""

    def __init__(self, segments: int, op: AbstractContextManager[object]) -> None:
        """op: is entered, too"""
        self._segments, self._op = segments, op

    def __enter__(self) -> None:
        self._op.__enter__()
        try:
            _of_op.set(self._segments)
        except BaseException as error:  # Ctrl-C
            self._op.__exit__(type(error), error, error.__traceback__)
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        _of_op.set(0)
        self._op.__exit__(kind, error, trace)


def described() -> str:
    """Return the default as text, which ranks compare with their requests."""
    return f" and {VARIABLE}={default.segments}" if default.segments else ""


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
