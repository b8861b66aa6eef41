"""What an engine of gradient buckets does, and which of the two does it: C++, or the same in Python."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Literal, Protocol

import torch
from torch import Tensor

from tpkernels.comm import _ext
from tpkernels.comm.groups import LiveGroup

LONGEST_TIMEOUT = timedelta(days=365)  # clocks count nanoseconds, and overflow in 292 years
EngineChoice = Literal["auto", "cpp", "python"]


@dataclass(frozen=True)
class EngineOptions:
    """What both engines are told at construction."""

    group: LiveGroup
    tensor_parallel_group: LiveGroup | None  # where gradients of marked parameters are summed first
    rank: int  # of this process in the world, for messages
    reduce_scatter: bool  # else all-reduce
    average: bool  # over `group`; else sum
    main_grad: bool  # gradients are accumulated beside `grad`, which stays None
    check_nan: bool
    grad_dtype: torch.dtype | None  # of buckets; the parameters' own if None
    wire_dtype: torch.dtype | None  # of what is sent; if None the buckets' own, or wider
    timeout: timedelta | None  # of a collective; the group's own if None


class Engine(Protocol):
    """Takes gradients into flat buckets and reduces them while backward goes on.

    A round goes from `zero` (or the first gradient after `finish`) to `finish`. csrc/bucket_engine.h says
    more of each method.
    """

    def arrange(self, bucket_of: list[int], offset_of: list[int], elements: list[int], /) -> None:
        """Make the buckets, and move the gradients into them."""

    def expect(self, arrivals: list[int], /) -> None:
        """How many gradients each parameter receives in a round: from now on, backward launches."""

    def zero(self) -> bool:
        """Start a round without gradients. True if one had begun, which other ranks may be in."""

    def finish(self) -> list[int]:
        """End the round: all gradients are reduced. The parameters that received none here."""

    def set_synchronizing(self, synchronizing: bool, /) -> None:
        """Whether gradients count towards a launch, or are only accumulated."""

    def detach(self) -> None:
        """Leave the parameters alone from now on: no hooks, nothing in flight."""

    def buckets(self) -> list[Tensor]:
        """The flat buckets."""

    def views(self) -> list[Tensor]:
        """Each parameter's part of its bucket."""

    def arrivals(self) -> list[int]:
        """How many gradients each parameter received in the last round."""

    def last_arrivals(self) -> list[int]:
        """When each parameter received its last gradient in the last round: from 1; 0: never."""

    def launched_in_backward(self) -> int:
        """How many buckets of the last round did not have to wait for `finish`."""


def runs_native(choice: EngineChoice) -> bool:
    """Whether the C++ engine is to be used. An explicit choice is never replaced by the other."""
    if choice == "python":
        return False
    if choice not in ("auto", "cpp"):
        raise ValueError(f"engine: expected 'auto', 'cpp' or 'python', got {choice!r}")
    if _ext.available():
        return True
    if choice == "cpp":
        raise RuntimeError(f"engine='cpp': the C++ extension is absent: {_ext.extension().detail}")
    _warn_once()
    return False


@cache
def _warn_once() -> None:
    warnings.warn(
        f"gradient buckets run in Python, for the C++ extension is absent: {_ext.extension().detail}",
        RuntimeWarning,
        stacklevel=4,
    )


def make_engine(
    parameters: Sequence[Tensor],
    names: Sequence[str],
    marked: Sequence[bool],
    options: EngineOptions,
    *,
    native: bool,
) -> Engine:
    """An engine for `parameters`, which stand for each other by position.

    marked: whether the gradient is summed over the tensor-parallel group as well
    """
    if not native:
        from tpkernels.buckets.bucket_engine import BucketEngine  # not needed where the extension is

        return BucketEngine(parameters, names, marked, options)
    tensor_parallel_group = options.tensor_parallel_group
    engine: Engine = torch.classes.tpkernels.BucketEngine(
        list(parameters),
        list(names),
        list(marked),
        options.group.name,
        "" if tensor_parallel_group is None else tensor_parallel_group.name,
        options.rank,
        options.reduce_scatter,
        options.average,
        options.main_grad,
        options.check_nan,
        options.grad_dtype,
        options.wire_dtype,
        -1 if options.timeout is None else max(1, round(options.timeout.total_seconds() * 1000)),
    )
    return engine
