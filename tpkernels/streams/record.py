"""Records the tasks that each rank's host code enqueues; the machine replaces torch's stream API."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import _symmetric_memory as symmetric_memory
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import KernelInterface

from tpkernels.comm.transports import c10d, select, symmetric
from tpkernels.comm.transports.mailbox import Opening
from tpkernels.comm.transports.memory import Layout
from tpkernels.comm.transports.symmetric import SymmetricExchange
from tpkernels.dispatch import backends
from tpkernels.kernels import interpret, launch_plans, reduce, target, tiles
from tpkernels.kernels.matmul_tile import MatmulTile
from tpkernels.kernels.target import Target
from tpkernels.streams import models
from tpkernels.streams.device import Device, Event, Graph, Stream, current_device
from tpkernels.streams.peers import Handle, NcclGroup, SharedMemory, nccl_blocks
from tpkernels.streams.program import Program
from tpkernels.streams.tensors import OnDevice, VirtualTensor, made_of_numbers, moved, wrapped

PROCESSORS = 8
_TILE = MatmulTile(16, 16, 16, num_warps=4, num_stages=1, parts=1, group=1)  # waiting kernels fill a GPU
Body = Callable[[ProcessGroup], Sequence[Tensor]]


@dataclass(frozen=True)
class Machine:
    """The GPUs and machines of the ranks."""

    ranks: int
    machines: int = 1  # with equally many ranks each
    processors: int = PROCESSORS  # of each GPU
    models: Mapping[str, models.Model] = field(default_factory=dict)  # of kernels that are not ours
    numbers: bool = True  # False: tensors have sizes only, and only rank 0 is recorded
    exchange: type[SymmetricExchange] = SymmetricExchange  # over symmetric memory


def record(machine: Machine, body: Body, transport: str = "symmetric") -> Program:
    """Return the program of all ranks.

    body: a rank's host code; takes its group, returns its result tensors
    transport: as TPKERNELS_TRANSPORT
    """
    program = Program(machine.ranks, machine.processors, machine.numbers)
    devices = [Device(program, rank) for rank in range(machine.ranks)]
    program.memories += devices
    memory = SharedMemory(devices)
    for device in devices if machine.numbers else devices[:1]:
        with (
            device,
            _group(device.rank, machine.ranks) as group,
            _standing_in(group, machine, memory, transport),
        ):
            results = [each for each in tree_leaves(body(group)) if isinstance(each, VirtualTensor)]
            program.results.append([each.elem for each in results])
    return program


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
    group: ProcessGroup, machine: Machine, memory: SharedMemory, transport: str
) -> Iterator[None]:
    gpu, numbers = current_device(), itertools.count()
    a_machine = machine.ranks // machine.machines
    first = gpu.rank // a_machine * a_machine
    here = range(first, first + a_machine)
    known = {**models.OURS, **machine.models}

    def open_virtual(opening: Opening) -> SymmetricExchange:
        """Open an exchange without torch's rendezvous."""
        number, layout = next(numbers), opening.layout
        memories = memory.open(number, layout.byte_count)
        handle = Handle(number, memories, here, here.index(gpu.rank))
        own = wrapped(gpu, memories[gpu.rank])
        if not machine.numbers:
            gpu.program.turned.update(_turned(layout, memories))
        streams = symmetric.streams_of(opening.group, gpu.device)
        return machine.exchange(
            opening.name, layout, handle, own, opening.timeout, list(here), streams=streams
        )

    opened: dict[int, tuple[int, list[Tensor]]] = {}  # by the address of our own

    def empty(*size: int, dtype: torch.dtype = torch.float32, device: object = None) -> Tensor:
        """Replaces `symmetric_memory.empty`; zeroed, because all ranks open it before any task runs."""
        shape = torch.Size(size)
        number = next(numbers)
        memories = memory.open(number, shape.numel() * dtype.itemsize)
        own = memories[gpu.rank].view(dtype).view(shape)
        opened[own.data_ptr()] = number, memories
        return wrapped(gpu, own)

    def rendezvous(tensor: Tensor, group: object) -> Handle:
        number, memories = opened[tensor.data_ptr()]
        return Handle(number, memories, here, here.index(gpu.rank))

    def on_grid(kernel: Any, grid: Any) -> Callable[..., object]:
        return partial(models.launched, gpu, known, kernel, grid)

    gpu_target = Target("interpreter" if machine.numbers else "cuda", 90, machine.processors)
    properties = type("Properties", (), {"multi_processor_count": machine.processors})
    changes = [
        patch.dict(select.openers, symmetric=open_virtual),
        patch.object(symmetric, "_TRANSFERS", nccl_blocks(machine.processors)),
        patch.object(select, "requested_transport", transport),
        patch.object(c10d, "_processors", lambda device: machine.processors * (device.type == "cuda")),
        patch.object(backends, "backend", "auto"),
        # products without waits: our kernels for these have no models
        patch.object(backends, "_resolved", lambda *_: "torch" if machine.numbers else "triton"),
        patch.object(KernelInterface, "__getitem__", on_grid),
        patch.object(symmetric_memory, "empty", empty),
        patch.object(symmetric_memory, "rendezvous", rendezvous),
        patch.object(interpret, "INTERPRETING", False),
        patch.object(target, "_gpu", lambda _: gpu_target),
        patch.object(tiles, "_INTERPRETED", _TILE),
        patch.object(reduce, "INTERPRETED_SLOT_SUM", tiles.SlotSumTile(2, 32, num_warps=4, per_processor=1)),
        *_torchs_api(gpu, properties),
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


def _turned(layout: Layout, memories: Sequence[Tensor]) -> Iterator[tuple[int, int]]:
    """Yield pairs of flags: a peer's, and rank 0's own that a peer raises when rank 0 raises the first."""
    own, words = layout.mailbox(memories[0]).flags, layout.ranks * layout.splits
    for peer, memory in enumerate(memories):
        for theirs, ours in zip(layout.mailbox(memory).flags, own, strict=True):
            for index in range(words):
                turned = (index - peer * layout.splits) % words
                yield theirs.data_ptr() + 4 * index, ours.data_ptr() + 4 * turned


def _torchs_api(device: Device, properties: object) -> list[Any]:
    """Return patches of torch's functions for streams, events and graphs."""
    cuda = torch.cuda
    return [
        patch.object(torch, "tensor", made_of_numbers),
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
