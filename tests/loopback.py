"""Exchanges among virtual ranks of one process: for tests of kernels that wait, and to time them on one GPU.

One thread may serve them all: it starts a call on every end before it computes on any.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tpkernels.comm.calls import Call
from tpkernels.comm.schedule import Round, gather_plan, reduce_plan
from tpkernels.comm.side_stream import StreamOrder
from tpkernels.comm.transports.host import HostExchange, Pusher
from tpkernels.comm.transports.mailbox import MailboxDelivery, MailboxExchange
from tpkernels.comm.transports.memory import Layout
from tpkernels.comm.transports.symmetric import GroupStreams, SymmetricExchange


def start(
    exchange: MailboxExchange, shards: Sequence[Tensor], call: Call | None = None, *, reducing: bool = False
) -> MailboxDelivery:
    """Begin the next call and send all of it: shard d to rank d; a gather sends the same one to all."""
    (size, cols), planned = shards[0].shape, reduce_plan if reducing else gather_plan
    plan = planned(exchange.ranks * size, exchange.ranks, exchange.rank, exchange.splits, False)
    delivery = exchange.begin(call, plan, cols, shards[0])
    if reducing:
        for swap in plan.swaps:
            delivery.move(Round(swap.sent, (swap,)), shards[swap.to], swap.to * size)
    else:
        delivery.move(plan.together, shards[exchange.rank], plan.own.start)
    delivery.keep(shards[exchange.rank])
    return delivery


def open_loopback(
    name: str, layout: Layout, timeout: float = 60.0, pushers: Sequence[Pusher] | None = None
) -> list[HostExchange]:
    """The ends of an exchange in CPU memory. pushers: of each rank, which other exchanges may share"""
    mailboxes = [layout.mailbox(memory) for memory in _memories(name, layout, torch.device("cpu"))]
    pushers = pushers or [Pusher(f"push of {name}") for _ in mailboxes]
    return [
        HostExchange(name, rank, layout, mailboxes, timeout, pusher=pusher)
        for rank, pusher in enumerate(pushers)
    ]


def open_symmetric_loopback(
    name: str, layout: Layout, timeout: float = 60.0, device: torch.device | str = "cpu"
) -> list[SymmetricExchange]:
    """The ends of an exchange on one device, by the code of `symmetric`."""
    memories = _memories(name, layout, torch.device(device))
    order = StreamOrder(torch.device(device))
    return [
        SymmetricExchange(
            *(name, layout, VirtualHandle(memories, rank), memory, timeout),
            streams=GroupStreams.of(torch.device(device))._replace(order=order),
        )
        for rank, memory in enumerate(memories)
    ]


class VirtualHandle:
    """Stands for torch's `_SymmetricMemory` where all ranks are virtual."""

    native_words = True

    def __init__(self, memories: Sequence[Tensor], rank: int) -> None:
        self._memories, self.rank, self.world_size = memories, rank, len(memories)

    def get_buffer(self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self._memories[rank].view(dtype).view(sizes)

    def barrier(self, channel: int, timeout_ms: int) -> None:
        """Nothing to wait for: all ranks compute in one stream, which pushes wait for."""

    def stream_write_value32(self, tensor: Tensor, offset: int, val: int) -> None:
        write_word(tensor, offset, val)


def write_word(tensor: Tensor, offset: int, val: int) -> None:
    """Torch's own on a GPU; on a CPU a store, after those before."""
    assert (tensor.dtype, tensor.ndim) == (torch.uint32, 1)
    assert 0 <= val < 2**32
    if tensor.is_cuda:
        from torch._C._distributed_c10d import _SymmetricMemory

        _SymmetricMemory.stream_write_value32(tensor, offset, val)
    else:
        tensor[offset].fill_(val)


class CountingKernels:
    """What `kernels.flags` does, on the CPU."""

    def advance(self, word: Tensor, awaited: Tensor, step: int, code: int) -> None:
        assert -(2**31) <= code < 2**31
        word.add_(step)
        awaited.copy_(word | code)

    def kernel_and_chunk(self, word: int) -> tuple[str, int]:
        return "linear", word


def _memories(name: str, layout: Layout, device: torch.device) -> list[Tensor]:
    layout.require_rows(name)
    return [torch.zeros(layout.byte_count, dtype=torch.uint8, device=device) for _ in range(layout.ranks)]
