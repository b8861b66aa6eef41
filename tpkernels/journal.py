"""Steps of ops, told to readers: ranges of a profiler, lines of a log, `explain`, `assert_overlapped`.

A step is an op, a transfer's start, a wait for its rows, or a product. Where steps are made, the code asks
`readers or is_profiled()`, which is no Python call: nobody who reads nothing pays for the names.

    TPKERNELS_LOG=calls      one line on stderr as each transfer starts
    TPKERNELS_NVTX=1         a range of NVTX for each step, for Nsight Systems
    a profiler of torch's    a `record_function` range for each step
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.profiler import record_function

is_profiled = torch.autograd._profiler_enabled


@dataclass(eq=False, slots=True)
class Transfer:
    """A call of a group in which rows move."""

    op: str
    number: int  # of the call in its group
    rank: int  # in the group
    ranks: int
    what: str  # such as "gather of x (64, 128) torch.float32"
    way: str  # how the rows move
    why: str  # they do not move in a better way, or ""
    why_bare: str  # no product of the op hides them, or ""
    device: torch.device
    parts: int = 0  # of a sum, that were begun to be computed
    is_sent: bool = False  # the first part, at least
    is_awaited: bool = False  # all of it: no later product hides it

    @property
    def in_flight(self) -> bool:
        return self.is_sent and not self.is_awaited

    def __str__(self) -> str:
        return f"#{self.number} {self.op}: {self.what}"


StepKind = Literal["op", "transfer", "wait", "product", "pass"]  # pass: of a primitive that is no product


@dataclass(frozen=True, slots=True)
class OpStep:
    """A step of an op. name: without what differs between calls; text: all of it"""

    kind: StepKind
    name: str
    text: str
    tensors: Sequence[Tensor] = ()  # operands of an op or a product
    transfer: Transfer | None = None
    by: str = ""  # whom a product is computed
    why: str = ""  # it is computed by nobody better


class JournalReader(Protocol):
    """A reader of the journal. Steps of a thread are nested."""

    def begin(self, step: OpStep) -> None: ...
    def end(self, step: OpStep) -> None: ...


readers: list[JournalReader] = []


@contextmanager
def read_by(reader: JournalReader) -> Iterator[None]:
    """Tell all steps to a reader, of all threads, as long as the context lasts."""
    readers.append(reader)
    try:
        yield
    finally:
        readers.remove(reader)


@contextmanager
def entered(step: OpStep) -> Iterator[None]:
    """Tell a step to all readers, and to a profiler."""
    with ExitStack() as stack:
        if is_profiled():
            stack.enter_context(record_function(f"tpkernels: {step.text}"))
        for reader in tuple(readers):
            reader.begin(step)
            stack.callback(reader.end, step)
        yield


class NvtxRanges:
    """A range of NVTX for each step."""

    def begin(self, step: OpStep) -> None:
        torch.cuda.nvtx.range_push(f"tpkernels: {step.text}")

    def end(self, step: OpStep) -> None:
        torch.cuda.nvtx.range_pop()


class Lines:
    """A line for each transfer, as it starts: the last line of a rank that hangs tells where it hangs."""

    def __init__(self, write: Callable[[str], object], computing: Callable[[torch.device], str]) -> None:
        """computing: who computes products on a device"""
        self._write, self._computing, self._here = write, computing, threading.local()

    def begin(self, step: OpStep) -> None:
        if step.kind == "op":
            self._here.by = step.by
        if step.kind == "transfer" and (transfer := step.transfer):
            device = transfer.device
            captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
            mode = "captured" if captured else getattr(self._here, "by", "") or "eager"
            self._write(
                f"rank {transfer.rank} of {transfer.ranks} {transfer}; {transfer.way}; "
                f"{self._computing(device)} computes; {mode}"
            )

    def end(self, step: OpStep) -> None:
        if step.kind == "op":
            self._here.by = ""
