"""Records the tasks that each rank's host code enqueues; the machine replaces torch's stream API.

The peers of a rank's host code: a process group over NCCL, and memory that ranks share.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import _symmetric_memory as symmetric_memory
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import KernelInterface

from bench.streams import models
from bench.streams.device import (
    Device,
    Event,
    Graph,
    MachineError,
    Program,
    Span,
    Step,
    Stream,
    TorchSettings,
    TransferEnd,
    current_device,
)
from bench.streams.tensors import OnDevice, VirtualTensor, moved, spans_of, tensor_stand_in, wrapped
from tpkernels.comm import carveout
from tpkernels.comm.transports import c10d, select, symmetric
from tpkernels.comm.transports.mailbox import Opening
from tpkernels.comm.transports.symmetric import SymmetricExchange
from tpkernels.dispatch import backends, scaled
from tpkernels.env import NCCL_BLOCKS
from tpkernels.groups.c10d import new_group
from tpkernels.kernels import interpret, launch_plans, reduce, target, tiles
from tpkernels.kernels.matmul_tile import MatmulTile
from tpkernels.kernels.target import Target
from tpkernels.reserved_sms import ReservedSms


def nccl_blocks(processors: int) -> int:
    """Return the processors of a collective, which products leave free: see `comm.carveout`."""
    return max(1, processors // 8)


class MemoryOfRanks:
    """Shared memory: at each opening every rank has a piece, numbered by the order of openings."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices, self._opened = devices, dict[int, list[Tensor]]()

    def open(self, number: int, size: int) -> list[Tensor]:
        """Return the pieces of all ranks, zeroed before any task runs."""
        if number not in self._opened:
            self._opened[number] = [device.shared(size) for device in self._devices]
        return self._opened[number]


class SymmetricMemoryStandIn:
    """Replaces torch's `_SymmetricMemory`."""

    def __init__(self, number: int, memories: Sequence[Tensor], rank: int) -> None:
        """number: of the exchange"""
        self._number, self._memories, self.rank, self.world_size = number, memories, rank, len(memories)

    def get_buffer(self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        count = torch.Size(sizes).numel() * dtype.itemsize
        return wrapped(current_device(), self._memories[rank][:count].view(dtype).view(sizes))

    def barrier(self, channel: int, timeout_ms: int) -> None:
        """Enqueue a kernel of one block that waits for the other ranks' kernels."""
        device, kind = current_device(), ("barrier", self._number, channel)
        number = device.program.number(kind, device.rank)
        ends = [
            TransferEnd((kind, number, pair), peer, sends, None, "barrier")
            for peer in range(self.world_size)
            for sends, pair in ((True, (device.rank, peer)), (False, (peer, device.rank)))
        ]
        device.enqueue("barrier", [[Step()]], ends=ends, channel=kind[1:])

    def stream_write_value32(self, tensor: Tensor, offset: int, val: int) -> None:
        """Enqueue a write of a word, after a fence, without a kernel."""
        assert isinstance(tensor, VirtualTensor), "words of a device"
        word, value = tensor.elem[offset : offset + 1].view(torch.int32), val - 2**32 * (val >= 2**31)
        device, address = current_device(), word.data_ptr()

        def write() -> None:
            word.fill_(value)

        plain = () if device.program.is_shared(address) else spans_of(word)  # a flag orders other accesses
        step = Step(write, writes=plain, raises=lambda: [address])
        device.enqueue("a word is written", [[step]], on_processors=False)


class _CollectiveInFlight:
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


class NcclBackend:
    """Replaces a group's backend."""

    supports_coalescing = True

    def __init__(self, blocks: int = NCCL_BLOCKS) -> None:
        config = SimpleNamespace(max_ctas=blocks)
        self.options = SimpleNamespace(_timeout=timedelta(seconds=60), config=config)

    def name(self) -> str:
        return "nccl"


def _require_sum(options: Any) -> None:
    if options is not None and options.reduceOp != dist.ReduceOp.SUM:
        raise MachineError(f"expected ReduceOp.SUM, the machine's only reduction, got {options.reduceOp}")


_Messages = list[tuple[int, Tensor]]  # the other rank, and the rows that it receives or sends


class NcclGroup(dist.ProcessGroup):
    """One rank of a group whose peers enqueue the same collectives in the same order.

    Its communicator runs one kernel at a time, whose blocks are resident at once.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__(rank, ranks)  # type: ignore[call-arg]  # as torch's own test groups do
        device = current_device()
        self.members: tuple[int, ...] = tuple(range(device.program.ranks))  # ranks of the program
        self.label = f"virtual {device.program.number('groups of all', device.rank)}"
        self._stream, self._blocks = Stream(), nccl_blocks(device.program.processors)
        self._together: list[tuple[_Messages, _Messages]] | None = None

    def getBackendName(self) -> str:
        return "virtual"

    @property
    def group_name(self) -> Any:
        return self.label

    def _get_backend(self, device: torch.device) -> Any:
        return NcclBackend(self._blocks)

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
        device, stream, rank = current_device(), self._stream, self.members[self.rank()]
        if len(self.members) != self.size():
            raise MachineError("expected a group of all ranks, or of `group_among`, got another")
        stream.wait_stream(device.stream)
        collectives = self.label, "collective"
        kind = (self.label, among) if among else (*collectives, device.program.number(collectives, rank))
        ends: list[TransferEnd] = []
        spans: dict[bool, list[Span]] = {True: [], False: []}
        for is_sent, messages in ((True, sends), (False, receives)):
            for peer, rows in ((self.members[member], rows) for member, rows in messages):
                assert isinstance(rows, VirtualTensor), "NCCL moves what is on the device"
                pair = (rank, peer) if is_sent else (peer, rank)
                number = device.program.number((kind, pair, is_sent), rank)
                ends.append(TransferEnd((kind, pair, number), peer, is_sent, rows.elem, name))
                spans[is_sent] += spans_of(rows.elem)
        step = Step(reads=tuple(spans[True]), writes=tuple(spans[False]))
        programs = [[step], *[[Step()] for _ in range(self._blocks - 1)]]
        device.enqueue(name, programs, stream=stream, ends=ends, needs_at_once=self._blocks, sums=sums)
        return _CollectiveInFlight(stream, (sends, receives))

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


PROCESSORS = 8
_TILE = MatmulTile(16, 16, 16, num_warps=4, num_stages=1, parts=1, group=1)  # waiting kernels fill a GPU
RankProgram = Callable[[ProcessGroup], Sequence[Tensor]]


@dataclass(frozen=True)
class Machine:
    """The GPUs of the ranks."""

    ranks: int
    processors: int = PROCESSORS  # of each GPU
    models: Mapping[str, models.Model] = field(default_factory=dict)  # of kernels that are not ours

    def __post_init__(self) -> None:
        if min(self.ranks, self.processors) < 1:
            raise ValueError(
                "Machine: expected ranks and processors of at least 1, got "
                f"{self.ranks} and {self.processors}"
            )


def record(machine: Machine, body: RankProgram, transport: str = "symmetric") -> Program:
    """Return the program of all ranks.

    body: a rank's host code; takes its group, returns its result tensors
    transport: as TPKERNELS_TRANSPORT
    """
    program = Program(machine.ranks, machine.processors)
    devices = [Device(program, rank) for rank in range(machine.ranks)]
    program.memories += devices
    memory = MemoryOfRanks(devices)
    for device in devices:
        with (
            device,
            _group(device.rank, machine.ranks) as group,
            _standing_in(group, machine, memory, transport),
        ):
            results = [each for each in tree_leaves(body(group)) if isinstance(each, VirtualTensor)]
            program.results.append([each.elem for each in results])
            reads = tuple(span for each in results for span in spans_of(each.elem))
            device.enqueue("the caller reads its results", [[Step(reads=reads)]], on_processors=False)
            _require_restored(device)
    return program


def _require_restored(device: Device) -> None:
    """Raise unless torch's settings are what they were before the program."""
    if device.settings != TorchSettings():
        raise MachineError(
            f"rank {device.rank} ends with {device.settings.reserved} SMs reserved, and prefers "
            f"{device.settings.library}: expected what the caller had set, {TorchSettings()}"
        )


def group_among(ranks: Sequence[int]) -> ProcessGroup:
    """Make a group of some ranks, this one among them, in the body of a program."""
    device = current_device()
    number = device.program.number(("groups", *ranks), device.rank)
    name = f"{number} of ranks {', '.join(map(str, ranks))}"
    group = new_group(
        tuple(ranks), name=name, description=name, timeout=timedelta(60), backend=None, options=None
    )
    assert isinstance(group, NcclGroup), "the machine's backend makes it"
    group.members, group.label = tuple(ranks), name
    return group


@contextmanager
def _group(rank: int, ranks: int) -> Iterator[ProcessGroup]:
    if not hasattr(dist.Backend, "VIRTUAL"):
        dist.Backend.register_backend("virtual", _make_group, devices=["cpu", "cuda"])
    with (
        patch.object(sys, "excepthook", sys.excepthook),  # torch's hook reports each group
        patch.dict(os.environ, TORCH_FR_BUFFER_SIZE="0"),  # torch 2.15 cannot record a group without backends
    ):
        dist.init_process_group("virtual", store=dist.HashStore(), rank=rank, world_size=ranks)
        try:
            group = dist.group.WORLD
            assert group is not None, "init_process_group made it"
            yield group
        finally:
            dist.destroy_process_group()


def _make_group(store: object, rank: int, size: int, timeout: timedelta) -> ProcessGroup:
    return NcclGroup(rank, size)


@contextmanager
def _standing_in(
    group: ProcessGroup, machine: Machine, memory: MemoryOfRanks, transport: str
) -> Iterator[None]:
    gpu, numbers = current_device(), itertools.count()
    known = {**models.OURS, **machine.models}

    def open_virtual(opening: Opening) -> SymmetricExchange:
        """Open an exchange without torch's rendezvous."""
        number, layout = next(numbers), opening.layout
        memories = memory.open(number, layout.byte_count)
        handle = SymmetricMemoryStandIn(number, memories, gpu.rank)
        own = wrapped(gpu, memories[gpu.rank])
        streams = symmetric.streams_of(opening.group, gpu.device)
        return SymmetricExchange(opening.name, layout, handle, own, opening.timeout, streams=streams)

    opened: dict[int, tuple[int, list[Tensor]]] = {}  # by the address of our own

    def empty(*size: int, dtype: torch.dtype = torch.float32, device: object = None) -> Tensor:
        """Replaces `symmetric_memory.empty`; zeroed, because all ranks open it before any task runs."""
        shape = torch.Size(size)
        number = next(numbers)
        memories = memory.open(number, shape.numel() * dtype.itemsize)
        own = memories[gpu.rank].view(dtype).view(shape)
        opened[own.data_ptr()] = number, memories
        return wrapped(gpu, own)

    def rendezvous(tensor: Tensor, group: object) -> SymmetricMemoryStandIn:
        number, memories = opened[tensor.data_ptr()]
        return SymmetricMemoryStandIn(number, memories, gpu.rank)

    def on_grid(kernel: Any, grid: Any) -> Callable[..., object]:
        return partial(models.launched, gpu, known, kernel, grid)

    gpu_target = Target("interpreter", 90, machine.processors)
    capability = {"major": gpu_target.capability // 10, "minor": gpu_target.capability % 10}
    properties = SimpleNamespace(name="virtual GPU", multi_processor_count=machine.processors, **capability)
    reserved = ReservedSms()  # a process of its own, whose extension is not built
    changes = [
        patch.dict(select.openers, symmetric=open_virtual),
        patch.object(select, "requested_transport", transport),
        patch.object(carveout, "torchs_settings", lambda: reserved),
        patch.object(c10d, "processors_of", lambda device: machine.processors * (device.type == "cuda")),
        patch.object(backends, "backend", "auto"),
        # products without waits: our kernels for these have no models
        patch.object(backends, "_resolved", lambda *_: "torch"),
        patch.object(KernelInterface, "__getitem__", on_grid),
        # a CPU cannot widen the result of a product of bf16
        patch.object(scaled, "_wide_linear", lambda x, weight, wide: x.to(wide) @ weight.to(wide).t()),
        patch.object(symmetric_memory, "empty", empty),
        patch.object(symmetric_memory, "rendezvous", rendezvous),
        patch.object(interpret, "INTERPRETING", False),
        patch.object(target, "_gpu", lambda _: gpu_target),
        patch.object(tiles, "_INTERPRETED", _TILE),
        patch.object(reduce, "INTERPRETED_SLOT_SUM", tiles.BlockTile(2, 32, num_warps=4)),
        *torchs_api(gpu, properties),
    ]
    with ExitStack() as entered:
        for change in changes:
            entered.enter_context(change)
        entered.enter_context(OnDevice())  # type: ignore[no-untyped-call]
        launch_plans.forget()  # plans of another machine
        try:
            yield
        finally:
            launch_plans.forget()
            gpu.close()
            if exchanges := select._of_group.pop(id(group), None):  # it holds the group
                exchanges._open.clear()  # unclosed: closing asks the device


def torchs_api(device: Device, properties: object) -> list[Any]:
    """Return patches of torch's functions for streams, events and graphs."""
    cuda, settings = torch.cuda, device.settings
    return [
        patch.object(torch._C, "_get_sm_carveout_experimental", lambda: settings.reserved),
        patch.object(torch._C, "_set_sm_carveout_experimental", partial(setattr, settings, "reserved")),
        patch.object(torch._C, "_get_blas_preferred_backend", lambda: settings.library),
        patch.object(torch._C, "_set_blas_preferred_backend", partial(setattr, settings, "library")),
        patch.object(torch, "tensor", tensor_stand_in),
        patch.object(Tensor, "to", moved),
        patch.object(Tensor, "cuda", lambda tensor, *_, **__: moved(tensor, "cuda")),
        patch.object(torch, "Stream", Stream),
        patch.object(torch, "Event", Event),
        patch.object(torch.accelerator, "current_stream", lambda *_: device.stream),
        patch.object(torch.accelerator, "synchronize", lambda *_: device.synchronize()),
        patch.object(cuda, "Stream", Stream),
        patch.object(cuda, "Event", Event),
        patch.object(cuda, "stream", lambda stream: stream),
        patch.object(cuda, "current_stream", lambda *_: device.stream),
        patch.object(cuda, "synchronize", lambda *_: device.synchronize()),
        patch.object(cuda, "_lazy_init", lambda: None),
        patch.object(cuda, "current_device", lambda: 0),
        patch.object(cuda, "is_current_stream_capturing", lambda: device.stream.capture is not None),
        patch.object(cuda, "get_device_properties", lambda *_: properties),
        patch.object(cuda, "CUDAGraph", Graph),
        patch.object(cuda, "graph", _capturing),
    ]


@contextmanager
def _capturing(
    graph: Graph, pool: object = None, stream: Stream | None = None, **_: object
) -> Iterator[None]:
    """Replaces `torch.cuda.graph`: capture in a new stream, after all tasks of the device."""
    device = current_device()
    device.synchronize()
    with stream or Stream():
        graph.capture_begin()
        try:
            yield
        except BaseException:
            device.capture = None
            raise
        graph.capture_end()
