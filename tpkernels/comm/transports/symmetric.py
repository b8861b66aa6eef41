"""The `symmetric` transport: GPUs of one machine write into each other's memory, by torch's symmetric memory.

Copy engines push the rows on a stream beside the one that computes; a flag is a copy of one word of the call,
behind its rows in that stream. The epoch in it is counted on the device, so that a captured graph can be
replayed.

The hazards of writing after reading, and what excludes each:

- Rows land in a buffer that its owner still reads: a call begins with a barrier of all ranks in the computing
  stream, and pushes wait for it. Every rank has then done all that it enqueued before, also in a replay that
  uses one buffer each time. Two calls may be begun before the first is read: they have different buffers.
- A flag is seen before its rows: it is copied behind them in one stream.
- The epoch is counted up before it has been copied: each call has its own copy of it.
- Rows are changed while they are being pushed: `wait()` lets the current stream wait for the pushes.

What goes to other machines goes in a stream of its own: a push inside the machine does not queue behind a
slow link. There a flag is raised behind the arrival of its rows.

Not run on a GPU yet.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast
from weakref import WeakKeyDictionary, finalize

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.distributed import ProcessGroup, distributed_c10d

from tpkernels.comm.agreement import offers_of_all
from tpkernels.comm.calls import Call
from tpkernels.comm.schedule import Plan, Swap, flag_of
from tpkernels.comm.side_stream import SideStream
from tpkernels.comm.transports.mailbox import (
    Layout,
    Mailbox,
    MailboxDelivery,
    MailboxExchange,
    Opening,
    code_of,
)

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName

_OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"

# Processors that a waiting kernel leaves free. A copy between ranks that share a GPU takes some; what NCCL
# sends takes one a channel, and has to get them while the kernel waits for its rows.
_COPIES, _TRANSFERS = 4, 16


class Handle(Protocol):
    """What is used of torch's `_SymmetricMemory`."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def get_buffer(self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The memory of a rank, as a tensor of ours."""

    def barrier(self, channel: int, timeout_ms: int) -> None:
        """All ranks, in their current streams."""


class SymmetricExchange(MailboxExchange):
    """One rank's end in memory that all ranks of its machine can write."""

    host_waits = False

    def __init__(
        self,
        name: str,
        layout: Layout,
        handle: Handle,
        memory: Tensor,
        timeout: float,
        here: Sequence[int],
    ) -> None:
        """One rank's end.

        handle: of the ranks on this machine
        memory: our own, zeroed bytes
        here: the numbers of the ranks on this machine among all
        """
        mailboxes: list[Mailbox | None] = [None] * layout.ranks
        for number, peer in enumerate(here):
            mailboxes[peer] = layout.mailbox(handle.get_buffer(number, (memory.numel(),), torch.uint8))
        super().__init__(name, here[handle.rank], layout, mailboxes, timeout)
        self.margin = (_COPIES if len(here) == layout.ranks else _TRANSFERS) if memory.is_cuda else 0
        self._handle, self._memory = handle, memory
        self._word = torch.zeros_like(self.status)  # the epoch, counted where kernels can see it
        self._seen = torch.zeros(1, dtype=torch.int32, pin_memory=memory.is_cuda)
        self.side, self.inter_node_side = SideStream(memory.device), SideStream(memory.device)
        self.in_flight: set[SymmetricDelivery] = set()
        self.barrier()  # nobody raises a flag before it has been zeroed

    def late(self) -> int:
        """On a GPU what was left by calls that are done: an error comes with one of the next calls."""
        self._seen.copy_(self.status, non_blocking=True)
        return int(self._seen)

    def close(self) -> None:
        if self._memory.is_cuda:
            torch.accelerator.synchronize(self._memory.device)  # memory goes at once
        self.in_flight.clear()
        self._mailboxes = ()

    def barrier(self) -> None:
        self._handle.barrier(0, int(1000 * self.timeout))

    def _delivery(self, epoch: int, plan: Plan, call: Call | None) -> SymmetricDelivery:
        if not (self._memory.is_cuda and torch.cuda.is_current_stream_capturing()):
            self.side.let_current_wait()  # for readers in other streams, see `release`; a graph has its own
            self.inter_node_side.let_current_wait()
        self.barrier()
        awaited = self._word.add_(flag_of(1, 0)).bitwise_or(flag_of(0, code_of(call)))
        return SymmetricDelivery(self, epoch, plan, awaited, call)


class SymmetricDelivery(MailboxDelivery):
    """One call in the memory of GPUs."""

    exchange: SymmetricExchange

    def __init__(
        self, exchange: SymmetricExchange, number: int, plan: Plan, awaited: Tensor, call: Call | None
    ) -> None:
        super().__init__(exchange, number, plan, awaited, call)
        self._held: list[Tensor] = []  # what the other stream reads must not be freed in this one
        exchange.in_flight.add(self)

    def swap(self, swap: Swap, outgoing: Tensor) -> None:
        exchange = self.exchange
        computing: list[torch.Stream] = []
        exchange.side.note_current(computing)
        if swap.to in exchange.same_machine:
            exchange.side.wait_for(computing)
            with exchange.side.entered():
                exchange.put(swap.to, swap.lands, outgoing, self.number, self.awaited)
        if self.inter_node is not None:
            exchange.inter_node_side.wait_for(computing)
            with exchange.inter_node_side.entered():
                if (received := self.swap_inter_node(swap, outgoing)) is not None:
                    received.wait()  # holds up this stream, not the host
                    exchange.raise_flags(self.flags, swap.received, self.awaited)
                self.inter_node.await_sends()  # likewise
        self._held.append(outgoing)

    def wait(self) -> None:
        self.exchange.side.let_current_wait()
        self.exchange.inter_node_side.let_current_wait()
        self._held.clear()
        self.exchange.in_flight.discard(self)

    def release(self) -> None:
        readers: list[torch.Stream] = []
        self.exchange.side.note_current(readers)
        self.exchange.side.wait_for(readers)
        self.exchange.inter_node_side.wait_for(readers)
        self.exchange.released(self.number)


def open_symmetric(opening: Opening) -> SymmetricExchange:
    """Our end of an exchange; all ranks of the group call this at once."""
    name, group, layout, device = opening.name, opening.group, opening.layout, opening.device
    problem, gpu = why_not(device), ""
    try:
        layout.require_rows(name)
    except ValueError as error:
        problem = problem or str(error)
    if not problem:
        gpu = str(torch.cuda.get_device_properties(device).uuid)
    call = opening.begin()
    here, gpus = opening.offers(call, problem, gpu)
    require_gpu_each(name, gpus, group.rank())
    handle: Handle | None = None
    try:
        memory = _memory(layout.byte_count, device)
        all_here = len(here) == layout.ranks
        handle = _rendezvous(memory, group.group_name if all_here else name_of_ranks(group, here))
    except Exception as error:  # whatever it is, the others wait to be told
        problem = f"torch's symmetric memory refused: {error}"
    offers_of_all(name, call, problem)
    assert handle is not None
    own = handle.get_buffer(handle.rank, (memory.numel(),), torch.uint8)
    assert own.data_ptr() == memory.data_ptr(), "the handle's memory begins where ours does"
    return SymmetricExchange(name, layout, handle, memory, opening.timeout, here)


def why_not(device: torch.device) -> str:
    """What this rank lacks; nothing if it can take part."""
    if device.type != "cuda":
        return f"TPKERNELS_TRANSPORT=symmetric exchanges memory of GPUs, got {device}; use shared or c10d"
    if not torch.cuda.is_available():
        return "torch sees no GPU here"
    try:
        memory = import_module("torch.distributed._symmetric_memory")
    except ImportError as error:
        return f"this torch ({torch.__version__}) has no symmetric memory ({error}); use c10d"
    backend = memory.get_backend(device)
    if backend in ("NVSHMEM", "NCCL"):  # whose memory of other ranks is not always a tensor of ours
        return f"torch's symmetric memory is set to {backend}; call its set_backend('CUDA') before it is used"
    return ""


def require_gpu_each(name: str, gpus: list[str], rank: int) -> None:
    """Ranks that share a GPU are for tests, which ask torch for it by name."""
    shared = [peer for peer, gpu in enumerate(gpus) if gpus.count(gpu) > 1]  # the same on all ranks
    if shared and os.environ.get(_OVERLAPPING, "0") != "1":
        raise RuntimeError(
            f"{name} on rank {rank}: expected a GPU for each rank, got one for {shared}: "
            f"call torch.cuda.set_device(local_rank) first, or set {_OVERLAPPING}=1 to test on one GPU"
        )


def _memory(count: int, device: torch.device) -> Tensor:
    """Zeroed bytes, an allocation of their own: a pool would hand out a part of a larger one."""
    from torch._C._distributed_c10d import _SymmetricMemory

    return _SymmetricMemory.empty_strided_p2p((count,), (1,), torch.uint8, device).zero_()


def _rendezvous(memory: Tensor, group_name: GroupName) -> Handle:
    from torch.distributed import _symmetric_memory

    handle: Handle = _symmetric_memory.rendezvous(memory, group_name)
    return handle


_of_group: WeakKeyDictionary[ProcessGroup, ProcessGroup] = WeakKeyDictionary()  # torch holds them weakly


def name_of_ranks(group: ProcessGroup, here: Sequence[int]) -> GroupName:
    """A name by which torch's rendezvous finds the ranks `here` of `group`, known as long as the group lives.

    What bears it has a store and no backend: nothing is connected, and no collective can be called on it.
    """
    name = cast("GroupName", f"{group.group_name}, ranks {', '.join(map(str, here))}")
    if group not in _of_group:
        store = dist.PrefixStore(name, distributed_c10d._get_process_group_store(group))
        _of_group[group] = ProcessGroup(store, here.index(group.rank()), len(here))
        c10d._register_process_group(name, _of_group[group])
        finalize(group, _forget, name)
    return name


def _forget(name: GroupName) -> None:
    with suppress(RuntimeError):  # destroy_process_group() forgets all names at once
        c10d._unregister_process_group(name)
