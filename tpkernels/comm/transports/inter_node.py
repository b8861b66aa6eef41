"""Rows that an exchange swaps with ranks of other machines, whose memory it does not reach.

They travel point to point over the group. In the step that sends to rank - s, a rank receives from rank + s:
all ranks take their swaps in one order, so that nobody waits for somebody who waits for it. Rows land in the
receiver's slots, and the receiver raises their flags. A slot is free by then: its owner has begun the call,
hence released the one that was there.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor
from torch.distributed import Work

from tpkernels.comm.calls import Call
from tpkernels.comm.schedule import source_of
from tpkernels.comm.transports.transfers import Transfers


class FarCall:
    """What one call swaps."""

    def __init__(self, call: Call, near: Collection[int], slots: Tensor) -> None:
        """near: the ranks on this machine; slots: (ranks, rows, cols) of this rank"""
        self._rank, self._ranks, self._near = call.calls.rank, call.calls.ranks, near
        self._slots = slots
        self._transfers = Transfers(call)

    def swap(self, to: int, there: slice, rows: Tensor) -> tuple[int, Work | None]:
        """Send `rows` to rank `to`, and receive as many; near ranks neither get nor send anything here.

        there: where in a piece those rows are
        returns: who sends, and what to wait for before they are read, if that rank is far
        """
        source = source_of(self._ranks, self._rank, to)
        outgoing = rows.contiguous() if to not in self._near else rows[:0]
        incoming = self._slots[source, there if source not in self._near else slice(0)]
        return source, self._transfers.exchange(to, outgoing, source, incoming)

    def await_sends(self) -> None:
        """Until then nobody may overwrite what was sent."""
        self._transfers.await_sends()
