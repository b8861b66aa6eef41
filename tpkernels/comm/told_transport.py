"""A transport whose transfers are told to the journal: their start, each wait, their end.

It is put around another one while somebody reads the journal; rows move as before.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from tpkernels.comm.calls import Call
from tpkernels.comm.transports.in_memory import Mailboxes
from tpkernels.comm.transports.rows import Gather, Reduce, Terms, Transport
from tpkernels.journal import OpStep, Transfer, entered

if TYPE_CHECKING:
    from tpkernels.comm.transports.c10d import BackendSums

T = TypeVar("T")


class ToldTransport:
    """A transport of one call."""

    def __init__(
        self, transport: Transport, call: Call, device: torch.device, why: str, why_bare: str
    ) -> None:
        """why: rows do not move in a better way; why_bare: no product of the op hides them"""
        what = call.kind.described.removeprefix(f"{call.op}: ")
        calls = call.calls
        self.note, self._transport = transport.note, transport
        self._transfer = Transfer(
            call.op, call.number, calls.rank, calls.ranks, what, transport.way, why, why_bare, device
        )

    def gather(self, call: Call, shard: Tensor, rows: int, *, keeps: bool, at_once: bool) -> Gather:
        transfer = self._transfer
        with self._step("transfer"):
            gathering = self._transport.gather(call, shard, rows, keeps=keeps, at_once=at_once)
            transfer.is_sent = True
        gathering.watch(self._waiting)
        return gathering

    def reduce(self, call: Call, terms: Terms, bias: Tensor | None, *, at_once: bool) -> Reduce:
        # a kernel that stores rows where they belong sends while it computes
        self._transfer.is_sent = isinstance(self._transport, Mailboxes) and self._transport.pushes
        return self._summing(
            lambda counted: self._transport.reduce(call, counted, bias, at_once=at_once), terms
        )

    def all_reduce(self, call: Call, terms: Terms, bias: Tensor | None) -> Reduce:
        """Start an all-reduce of a backend that adds."""
        transport: BackendSums = self._transport  # type: ignore[assignment]  # no other transport has it
        return self._summing(lambda counted: transport.all_reduce(call, counted, bias), terms)

    def _summing(self, start: Callable[[Terms], Reduce], terms: Terms) -> Reduce:
        with self._step("transfer"):
            reducing = start(self._counted(terms))
            self._transfer.is_sent = True
        reducing.watch(self._waiting)
        return reducing

    def _counted(self, terms: Terms) -> Terms:
        """Return terms of which each part but the first is computed while an earlier one is in flight."""

        def compute(rows: slice) -> Tensor:
            self._transfer.is_sent = self._transfer.parts > 0
            self._transfer.parts += 1
            return terms.compute(rows)

        return replace(terms, compute=compute)

    def _waiting(self, wait: Callable[[], T], is_last: bool) -> Callable[[], T]:
        """Return a wait that is told to the journal."""

        def told() -> T:
            self._transfer.is_awaited |= is_last
            with self._step("wait"):
                return wait()

        return told

    def _step(self, kind: str) -> AbstractContextManager[None]:
        transfer, op = self._transfer, self._transfer.op
        text = f"{transfer}, {transfer.way}" if kind == "transfer" else f"wait for {transfer}"
        return entered(OpStep(kind, op, text, transfer=transfer))  # type: ignore[arg-type]
