"""Point-to-point transfers of one call: in one order on all ranks, with errors that say whose fault it is."""

from __future__ import annotations

from torch import Tensor
from torch.distributed import Work

from tpkernels.comm.calls import Call
from tpkernels.comm.groups import Start, refuse_other_devices, start_together


class Transfers:
    """Sends and receives that belong to one call."""

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

    def await_rows(self, received: Work | None, source: int) -> None:
        try:
            if received is not None:
                self._wait(received)
        except RuntimeError as error:
            raise self._failure(f"rows of rank {source} did not arrive", error) from error

    def _wait(self, work: Work) -> None:
        calls = self._call.calls
        calls.waiting = self._call.number  # for who watches
        work.wait()
        calls.waiting = 0

    def await_sends(self) -> None:
        """Until then nobody may overwrite what was sent."""
        for work, to, _ in self._sends:
            try:
                self._wait(work)
            except RuntimeError as error:
                raise self._failure(f"rank {to} did not take its rows", error) from error
        self._sends.clear()

    def _failure(self, what: str, error: RuntimeError) -> RuntimeError:
        calls = self._call.calls
        cause = calls.first_failure() or error
        return blaming(self._call.op, what, f"process group '{calls.name}'", calls.rank, calls.ranks, cause)


def blaming(op: str, what: str, where: str, rank: int, ranks: int, cause: object) -> RuntimeError:
    """An error that says which rank did not do its part."""
    return RuntimeError(
        f"{op}: {what}: it died, came too late, or left the common order of calls. Ranks are numbered within "
        f"{where}, where this is {rank} of {ranks}. Cause: {cause}"
    )
