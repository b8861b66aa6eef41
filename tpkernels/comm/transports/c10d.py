"""The `c10d` transport: chunks travel point to point over torch.distributed.

Each is on its way as soon as it is started, and what is computed meanwhile hides it. On NCCL they run on the
backend's own stream and waiting holds up the current stream only; on gloo its thread moves them, and waiting
blocks. All ranks take their swaps in one order: nobody waits for somebody who waits for it.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed import Work

from tpkernels.comm.calls import Call
from tpkernels.comm.groups import Start, refuse_other_devices, start_together
from tpkernels.comm.schedule import Plan, Swap, parts_of_shard
from tpkernels.comm.transports.base import Delivery, Exchange, blaming


class Transfers:
    """Sends and receives of one call, with errors that say whose fault it is."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._sends: list[tuple[Work, int, Tensor]] = []  # buffers live until they are sent

    def exchange(self, to: int, outgoing: Tensor, source: int, incoming: Tensor) -> Work | None:
        """Send and receive at once, which NCCL needs to get past both; what is empty is left out.

        returns: to wait for before `incoming` is read; None if it is empty
        """
        starts: list[Start] = []
        call = self._call
        if outgoing.numel():
            starts.append(lambda group: group.send([outgoing], to, call.tag))
        if incoming.numel():
            starts.append(lambda group: group.recv([incoming], source, call.tag))
        if not starts:
            return None
        try:
            works = start_together(call.group, outgoing.device, starts)  # one for both, or one each
        except RuntimeError as error:
            refuse_other_devices(call.op, call.group, outgoing.device)
            peers = {to} if outgoing.numel() else set()
            peers |= {source} if incoming.numel() else set()
            raise self._failure(f"rank {' or '.join(map(str, peers))} cannot be reached", error) from error
        if outgoing.numel():
            self._sends.append((works[0], to, outgoing))
        return works[-1] if incoming.numel() else None

    def await_rows(self, received: Work, source: int) -> None:
        try:
            self._call.wait_for(received.wait)
        except RuntimeError as error:
            raise self._failure(f"rows of rank {source} did not arrive", error) from error

    def await_sends(self) -> None:
        """Until then nobody may overwrite what was sent."""
        for work, to, _ in self._sends:
            try:
                self._call.wait_for(work.wait)
            except RuntimeError as error:
                raise self._failure(f"rank {to} did not take its rows", error) from error
        self._sends.clear()

    def _failure(self, what: str, error: RuntimeError) -> RuntimeError:
        calls = self._call.calls
        cause = calls.first_failure() or error
        return blaming(self._call.op, what, f"process group '{calls.name}'", calls.rank, calls.ranks, cause)


class C10dExchange(Exchange):
    """One for all groups and shapes: memory is each call's own."""

    tapered = host_waits = True

    def chunks(self, shard_bytes: int) -> int:
        return parts_of_shard(shard_bytes)

    def begin(self, call: Call, plan: Plan, cols: int, like: Tensor) -> Delivery:
        return _C10dDelivery(call, plan, like.new_empty(plan.rows, cols))


C10D = C10dExchange()


class _C10dDelivery(Delivery):
    lasts = True

    def __init__(self, call: Call, plan: Plan, memory: Tensor) -> None:
        self.plan, self.memory = plan, memory
        self._transfers = Transfers(call)
        self._arriving: dict[int, tuple[Work, int]] = {}  # by the first row of a chunk

    def swap(self, swap: Swap, outgoing: Tensor) -> None:
        incoming = self.memory[swap.received]
        received = self._transfers.exchange(swap.to, outgoing, swap.source, incoming)
        if received is not None:
            self._arriving[swap.received.start] = received, swap.source

    def keep(self, rows: Tensor) -> None:
        self.memory[self.plan.kept].copy_(rows)

    def await_rows(self, rows: slice) -> None:
        for start in [start for start in self._arriving if rows.start <= start < rows.stop]:
            self._transfers.await_rows(*self._arriving.pop(start))

    def end(self) -> None:
        self._transfers.await_sends()
