"""The Python interface of the C++ engine of gradient buckets (csrc/bucket_engine.cpp)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor

from tpkernels.buckets.live_group import LiveGroup
from tpkernels.buckets.supported import FLOATING
from tpkernels.comm.agreement import Problem
from tpkernels.comm.carveout import reservation_of

LONGEST_TIMEOUT = timedelta(days=365)  # clocks count nanoseconds, and overflow in 292 years


@dataclass(frozen=True)
class EngineOptions:
    """Options of an engine, fixed at construction."""

    group: LiveGroup
    tensor_parallel_group: LiveGroup | None  # where gradients of marked parameters are summed first
    rank: int  # of this process in the world, for messages
    reduce_scatter: bool  # else all-reduce
    average: bool  # over `group`; else sum
    main_grad: bool  # gradients are accumulated in `main_grad`; `grad` stays None
    check_nan: bool
    grad_dtype: torch.dtype | None  # of buckets; the parameters' own if None
    wire_dtype: torch.dtype | None  # of sent data; if None the buckets' own, or wider
    timeout: timedelta | None  # of a collective; the group's own if None

    def shown_tensor_parallel_group(self) -> str:
        group = self.tensor_parallel_group
        return "None" if group is None else f"of {group.size} ranks"


class Engine(Protocol):
    """Accumulates gradients in flat buckets and reduces them during backward.

    csrc/bucket_engine.h documents each method. Parameters are numbered by their position.
    """

    def arrange(self, bucket_of: list[int], offset_of: list[int], buckets: list[Tensor], /) -> None: ...
    def meet(
        self,
        tensor_parallel: bool,
        members: list[int],
        doorbells: list[Tensor],
        words: list[Tensor],
        flats: list[Tensor],
        across: str,
        owners: list[int],
        timeout_ms: int,
        /,
    ) -> None: ...
    def interrupt(self) -> bool: ...
    def launch_rest(self) -> bool: ...
    def settle(self, seconds: float, /) -> bool: ...
    def awaited(self) -> tuple[str, bool, list[int], list[int]]: ...
    def lose_others(self) -> None: ...
    def expect(self, arrivals: list[int], /) -> None: ...
    def zero(self) -> bool: ...
    def finish(self) -> list[int]: ...
    def is_midway(self) -> bool: ...
    def set_synchronizing(self, synchronizing: bool, /) -> None: ...
    def detach(self) -> None: ...
    def buckets(self) -> list[Tensor]: ...
    def views(self) -> list[Tensor]: ...
    def arrivals(self) -> list[int]: ...
    def last_arrivals(self) -> list[int]: ...
    def launched_in_backward(self) -> int: ...


def make_engine(
    parameters: Sequence[Tensor], names: Sequence[str], marked: Sequence[bool], options: EngineOptions
) -> Engine:
    """Make an engine and register its hooks on `parameters`.

    marked: for each parameter, whether its gradient is summed over the tensor-parallel group as well
    """
    tensor_parallel_group, timeout = options.tensor_parallel_group, options.timeout
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
        -1 if timeout is None else max(1, round(timeout.total_seconds() * 1000)),
        *reservation_of(options.group.get(), parameters[0].device),
    )
    return engine


def problem_of_options(
    bucket_bytes: object, reduce: str, grad_dtype: object, wire_dtype: object, timeout: object
) -> Problem | None:
    """Return why options of `GradientBuckets` are refused; None if they are valid."""
    if not isinstance(bucket_bytes, int) or bucket_bytes < 1:
        return "ValueError", f"bucket_bytes: expected a whole number of at least 1, got {bucket_bytes!r}"
    if timeout is not None and not isinstance(timeout, timedelta):
        return "TypeError", f"timeout: expected a datetime.timedelta, got {timeout!r}"
    if timeout is not None and not timedelta(0) < timeout < LONGEST_TIMEOUT:
        return "ValueError", f"timeout: expected more than zero and less than a year, got {timeout}"
    if reduce not in ("all_reduce", "reduce_scatter"):
        return "ValueError", f"reduce: expected 'all_reduce' or 'reduce_scatter', got {reduce!r}"
    for option, dtype in {"grad_dtype": grad_dtype, "wire_dtype": wire_dtype}.items():
        if dtype is not None and dtype not in FLOATING:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATING)
            return "TypeError", f"{option}: expected one of {names}, got {dtype}"
    return None
