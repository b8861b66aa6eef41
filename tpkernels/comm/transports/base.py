"""What every transport offers: a call's chunks are sent, received and awaited.

    plan = exchange.plan_gather(...)         or plan_reduce
    delivery = exchange.begin(call, plan, cols, like)
    delivery.move(round, rows, first_row)    returns at once; what a round sends and receives, as planned
    delivery.keep(rows)                      this rank's own rows, after all rounds, unless it `has_own`
    delivery.memory                          (plan.rows, cols); rows are valid once they are awaited
    delivery.end()                           memory has been read, and what was sent may change

`c10d` sends over torch.distributed, `host` and `shared` write into memory of the CPU, `symmetric` of GPUs.
Whose code waits for the chunks is the caller's choice, see `rows.Waits`.
"""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from tpkernels.comm.calls import Call
from tpkernels.comm.schedule import Plan, Round, Swap, gather_plan, reduce_plan
from tpkernels.errors import cause_of


class Exchange:  # no ABC, whose `isinstance` runs Python
    """How one rank moves rows in a group. All ranks begin the same calls, in one order."""

    tapered: bool  # whether chunks that nothing hides may be smaller than others
    host_waits: bool  # whether the host can wait for a chunk
    note = ""  # what ranks must do alike, beside what sizes say: they compare it before the first such call

    @abstractmethod
    def chunks(self, shard_bytes: int) -> int:
        """Return into how many chunks a shard is cut, the same on all ranks."""

    def plan_gather(self, rows: int, ranks: int, rank: int, shard_bytes: int, overlap: bool) -> Plan:
        """Return the plan by which `rank` gathers the rows of all; without overlap no shard is cut."""
        return gather_plan(rows, ranks, rank, self.chunks(shard_bytes) if overlap else 1, self.tapered)

    def plan_reduce(self, rows: int, ranks: int, rank: int, shard_bytes: int, overlap: bool) -> Plan:
        """Return the plan by which `rank` receives all partial sums of its rows."""
        return reduce_plan(rows, ranks, rank, self.chunks(shard_bytes) if overlap else 1, self.tapered)

    @abstractmethod
    def begin(self, call: Call, plan: Plan, cols: int, like: Tensor) -> Delivery:
        """Begin to move rows, and return the delivery. like: a tensor of their dtype and device"""


class Delivery:
    """One call in flight."""

    plan: Plan
    memory: Tensor  # (plan.rows, cols)
    lasts: bool  # whether memory belongs to this call alone; else the call after the next writes it
    has_own = False  # whether what was moved has brought this rank's own rows, too: `keep` is not called

    @property
    def slots(self) -> Tensor:
        """Return the received rows as (ranks, rows, cols), if all ranks send as many."""
        return self.memory.view(self.plan.ranks, self.plan.rows // self.plan.ranks, self.memory.shape[1])

    @abstractmethod
    def swap(self, swap: Swap, outgoing: Tensor) -> None:
        """Send a chunk, and receive one."""

    def move(self, round: Round, outgoing: Tensor, first_row: int) -> None:
        """Send and receive the rows of a round.

        outgoing: rows of the matrix from `first_row` on, all that are sent among them
        """
        for swap in round.swaps:
            self.swap(swap, rows_sent(swap, outgoing, first_row))

    @abstractmethod
    def keep(self, rows: Tensor) -> None:
        """Put this rank's own rows next to those that arrive, unless `has_own`."""

    @abstractmethod
    def await_rows(self, rows: slice) -> None:
        """Block until these rows have arrived: one chunk that `plan` receives, or several."""

    @abstractmethod
    def end(self) -> None:
        """Memory has been read: the call after the next may write it. Blocks until what was sent may change;
        on GPUs the current stream does."""


def rows_sent(swap: Swap, outgoing: Tensor, first_row: int) -> Tensor:
    """Return the rows of `outgoing` that a swap sends; see `Delivery.move`."""
    sent = swap.sent
    if sent.stop - sent.start == outgoing.shape[0]:
        return outgoing
    return outgoing[sent.start - first_row : sent.stop - first_row]


def blaming(op: str, what: str, where: str, rank: int, ranks: int, cause: object) -> RuntimeError:
    """Return an error that names the rank whose rows did not come."""
    return RuntimeError(
        f"{op}: {what}: it died, came too late, or left the common order of calls. Ranks are numbered within "
        f"{where}, where this is {rank} of {ranks}. Cause: {cause_of(cause)}"
    )
