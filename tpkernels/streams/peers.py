"""The peers of a rank's host code: a process group over NCCL, and memory that ranks share."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpkernels.streams.device import Device, MachineError, Stream, current_device
from tpkernels.streams.program import NO_WORK, End, Span, Step, Work
from tpkernels.streams.tensors import VirtualTensor, spans_of, wrapped


def nccl_blocks(processors: int) -> int:
    """Return the processors of a collective, which products leave free: see `comm.carveout`."""
    return max(1, processors // 8)


class SharedMemory:
    """Shared memory: at each opening every rank has a piece, numbered by the order of openings."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices, self._opened = devices, dict[int, list[Tensor]]()

    def open(self, number: int, size: int) -> list[Tensor]:
        """Return the pieces of all ranks, zeroed before any task runs."""
        if number not in self._opened:
            self._opened[number] = [device.shared(size) for device in self._devices]
        return self._opened[number]


class Handle:
    """Replaces torch's `_SymmetricMemory`."""

    def __init__(self, number: int, memories: Sequence[Tensor], here: Sequence[int], rank: int) -> None:
        """number: of the exchange; here: the ranks of this machine; rank: this one among them"""
        self._number, self._memories, self._here = number, memories, tuple(here)
        self.rank, self.world_size = rank, len(here)

    def get_buffer(self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        count = torch.Size(sizes).numel() * dtype.itemsize
        return wrapped(current_device(), self._memories[self._here[rank]][:count].view(dtype).view(sizes))

    def barrier(self, channel: int, timeout_ms: int) -> None:
        """Enqueue a kernel of one block that waits for the other ranks' kernels."""
        device, kind = current_device(), ("barrier", self._number, self._here, channel)
        number = device.program.number(kind, device.rank)
        ends = [
            End((kind, number, pair), peer, sends, None, "barrier")
            for peer in self._here
            for sends, pair in ((True, (device.rank, peer)), (False, (peer, device.rank)))
        ]
        device.enqueue("barrier", [[Step()]], ends=ends)

    def stream_write_value32(self, tensor: Tensor, offset: int, val: int) -> None:
        """Enqueue a write of a word, after a fence, without a kernel."""
        assert isinstance(tensor, VirtualTensor), "words of a device"
        word, value = tensor.elem[offset : offset + 1].view(torch.int32), val - 2**32 * (val >= 2**31)
        device, address = current_device(), word.data_ptr()

        def write() -> None:
            word.fill_(value)

        plain = () if device.program.is_shared(address) else spans_of(word)  # a flag orders other accesses
        step = Step(write, writes=plain, raises=lambda: [address])
        there = device.program.rank_at(address)
        work = Work("flag", (), there) if there != device.rank else NO_WORK
        device.enqueue("a word is written", [[step]], on_processors=False, work=work)


class _Work:
    """A collective in flight; as NCCL's, it holds its tensors until a wait."""

    def __init__(self, stream: Stream, held: object) -> None:
        self._done, self._held = stream.record_event(), held

    def wait(self, timeout: timedelta | None = None) -> bool:
        current_device().stream.wait_event(self._done)
        self._held = None
        return True

    def is_completed(self) -> bool:
        raise MachineError("a collective is queried, but the machine records before it runs: call wait()")


class EndedWork:
    """A transfer that has ended, such as a message between hosts, where all ranks send the same."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class _Options:
    _timeout = timedelta(seconds=60)


class NcclBackend:
    """Replaces a group's backend."""

    options, supports_coalescing = _Options(), True

    def name(self) -> str:
        return "nccl"


def _require_sum(options: Any) -> None:
    if options is not None and options.reduceOp != dist.ReduceOp.SUM:
        raise MachineError(f"expected ReduceOp.SUM, the machine's only reduction, got {options.reduceOp}")


_Messages = list[tuple[int, Tensor]]  # the other rank, and the rows that it receives or sends


class NcclGroup(dist.ProcessGroup):
    """One rank of a group whose peers enqueue the same collectives in the same order."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__(rank, ranks)  # type: ignore[call-arg]  # as torch's own test groups do
        device = current_device()
        if device.program.number("group", device.rank) > 1:
            raise MachineError("expected one group of all ranks, got a second group; use the first")
        self._stream, self._blocks = Stream(), nccl_blocks(device.program.processors)
        self._together: list[tuple[_Messages, _Messages]] | None = None

    def getBackendName(self) -> str:
        return "virtual"

    @property
    def group_name(self) -> Any:
        return "virtual"

    def _get_backend(self, device: torch.device) -> Any:
        return NcclBackend()

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cuda"), torch.device("cpu")]

    def _start(
        self, name: str, sends: _Messages, receives: _Messages, *, among: str = "", sums: bool = False
    ) -> Any:
        """Enqueue a collective, or messages between two ranks. among: their communicator"""
        if self._together is not None:
            self._together.append((sends, receives))
            return None
        device, stream, rank = current_device(), self._stream, self.rank()
        stream.wait_stream(device.stream)
        kind = (among,) if among else ("collective", device.program.number("collective", rank))
        ends: list[End] = []
        spans: dict[bool, list[Span]] = {True: [], False: []}
        for is_sent, messages in ((True, sends), (False, receives)):
            for peer, rows in messages:
                assert isinstance(rows, VirtualTensor), "NCCL moves what is on the device"
                pair = (rank, peer) if is_sent else (peer, rank)
                number = device.program.number((kind, pair, is_sent), rank)
                ends.append(End((kind, pair, number), peer, is_sent, rows.elem, name))
                spans[is_sent] += spans_of(rows.elem)
        step = Step(reads=tuple(spans[True]), writes=tuple(spans[False]))
        programs = [[step], *[[Step()] for _ in range(self._blocks - 1)]]
        device.enqueue(name, programs, stream=stream, ends=ends, needs_at_once=self._blocks, sums=sums)
        return _Work(stream, (sends, receives))

    def _start_coalescing(self, device: torch.device) -> None:
        self._together = []

    def _end_coalescing(self, device: torch.device) -> Any:
        together, self._together = self._together or [], None
        sends = [message for messages, _ in together for message in messages]
        receives = [message for _, messages in together for message in messages]
        return self._start("sends and receives", sends, receives, among="launches")

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        if not isinstance(input, VirtualTensor):
            output.view(self.size(), -1).copy_(input.view(1, -1))
            return EndedWork()
        parts = output.view(self.size(), -1)
        everyone = range(self.size())
        return self._start(
            "all-gather",
            [(peer, input) for peer in everyone],
            [(peer, parts[peer]) for peer in everyone],
        )

    def alltoall_base(
        self, output: Tensor, input: Tensor, received: list[int], sent: list[int], opts: Any = None
    ) -> Any:
        receives = enumerate(output.split(received) if received else output.chunk(self.size()))
        sends = enumerate(input.split(sent) if sent else input.chunk(self.size()))
        return self._start("all-to-all", list(sends), list(receives))

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        _require_sum(opts)
        parts = input.view(self.size(), -1)
        everyone = range(self.size())
        return self._start(
            "reduce-scatter",
            [(peer, parts[peer]) for peer in everyone],
            [(peer, output) for peer in everyone],
            sums=True,
        )

    def allreduce(  # type: ignore[override]
        self, tensors: list[Tensor], opts: Any = None
    ) -> Any:
        _require_sum(opts)
        (tensor,) = tensors
        everyone = range(self.size())
        ends = [(peer, tensor) for peer in everyone]
        return self._start("all-reduce", ends, list(ends), sums=True)

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Any:
        return self._start("sends and receives", [(to, tensors[0])], [], among="lone messages")

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Any:
        return self._start("sends and receives", [], [(source, tensors[0])], among="lone messages")

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        (tensor,), root = tensors, opts.rootRank
        sends = [(peer, tensor) for peer in range(self.size()) if peer != root]
        if self.rank() == root:
            return self._start("broadcast", sends, [])
        return self._start("broadcast", [], [(root, tensor)])

    # by torch's newer names
    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base  # type: ignore[assignment]
    all_to_all_single = alltoall_base  # type: ignore[assignment]
