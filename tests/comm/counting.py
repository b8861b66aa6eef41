"""What a tensor-parallel op asks of a GPU, counted without one.

An op runs as one rank of a group whose backend moves nothing, on tensors without memory.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bench.streams.record import EndedWork, NcclBackend
from tpkernels.comm.side_stream import SideStream, StreamOrder
from tpkernels.comm.transports import c10d, select, symmetric
from tpkernels.comm.transports.mailbox import Opening
from tpkernels.comm.transports.symmetric import GroupStreams
from tpkernels.dispatch import backends
from tpkernels.kernels import launch
from tpkernels.kernels.target import H100, Target
from tpkernels.ops import column_linear, row_linear
from tpkernels.ops.tensor_parallel.flag_waits import FlagKernels

PRODUCTS = ("linear_kernel", "fwd_kernel", "grad_kernel")  # ends of names of kernels
CASES = ("column forward", "column backward", "row forward", "row backward")
FEATURES = {4096: 14336, 8192: 28672}  # of the Llama-3 MLPs of these widths


@dataclass(frozen=True)
class Count:
    """What one call enqueues."""

    collectives: int
    products: int
    other_kernels: int
    copies: int
    flags: int  # words that a stream writes
    waits: int  # of a stream for another


class CountingGroup(dist.ProcessGroup):
    """A rank whose peers bring what it brings, at once. `notes`: launches, as NCCL makes them, and waits."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__(rank, ranks)
        self.notes: list[str] = []
        self._together: list[str] = []

    def getBackendName(self) -> str:
        return "counting"

    @property
    def group_name(self) -> Any:
        return "counting"

    def _get_backend(self, device: torch.device) -> Any:
        return NcclBackend()

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("meta"), torch.device("cpu")]

    @property
    def launched(self) -> int:
        return sum(not note.startswith("await") for note in self.notes)

    def _launch(self, name: str) -> Any:
        self.notes.append(name)
        return SimpleNamespace(wait=lambda *_: self.notes.append(f"await {name}"), is_completed=lambda: True)

    def _start_coalescing(self, device: torch.device) -> None:
        assert not self._together

    def _end_coalescing(self, device: torch.device) -> Any:
        together, self._together = self._together, []
        return self._launch(f"{together.count('send')} sends, {together.count('receive')} receives")

    def send(self, *_: object) -> None:
        self._together.append("send")

    def recv(self, *_: object) -> None:
        self._together.append("receive")

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        if input.is_cpu:  # a handshake: all ranks ask for the same
            output.view(self.size(), -1).copy_(input.view(1, -1))
            return EndedWork()
        assert output.shape[0] == self.size() * input.shape[0]
        return self._launch("all_gather")

    def alltoall_base(
        self, received: Tensor, sent: Tensor, received_rows: list[int], sent_rows: list[int], options: Any
    ) -> Any:
        assert (sum(received_rows), sum(sent_rows)) == (received.shape[0], sent.shape[0])
        return self._launch("all_to_all")

    def _reduce_scatter_base(self, *_: object) -> Any:
        return self._launch("reduce_scatter")

    def allreduce(self, *_: object) -> Any:
        return self._launch("all_reduce")


@contextmanager
def group_of(ranks: int) -> Iterator[CountingGroup]:
    """The default group of this process, which is one rank in the middle of it."""
    made: list[CountingGroup] = []

    def make(store: object, rank: int, size: int, timeout: timedelta) -> CountingGroup:
        made.append(CountingGroup(rank, size))
        return made[-1]

    if not hasattr(dist.Backend, "COUNTING"):
        dist.Backend.register_backend("counting", lambda *given: _maker[0](*given), devices=["cpu", "cuda"])
    _maker[:] = [make]
    # torch 2.15 records what groups do, by a name that one in Python has not got
    with patch.dict(os.environ, {"TORCH_FR_BUFFER_SIZE": "0"}):
        dist.init_process_group("counting", store=dist.HashStore(), rank=ranks // 2, world_size=ranks)
    try:
        yield cast("CountingGroup", dist.group.WORLD)
    finally:
        dist.destroy_process_group()


_maker: list[Callable[..., CountingGroup]] = []


@contextmanager
def standing_in_for(target: Target, transport: str, noted: Counter[str]) -> Iterator[list[launch.Launch]]:
    """Tensors without memory are taken for those of a GPU, whose launches of our kernels are listed."""

    def open_counted(opening: Opening) -> CountedExchange:
        layout, group = opening.layout, opening.group
        memory = torch.empty(layout.byte_count, dtype=torch.uint8, device="meta")
        handle = _Handle(group, noted)
        side = SideStream(torch.device("cpu"))
        side._stream = cast("torch.Stream", _Stream(noted))
        streams = GroupStreams(StreamOrder(torch.device("xpu")), side)  # any device that has streams
        exchange = CountedExchange(opening.name, layout, handle, memory, opening.timeout, streams=streams)
        if (push := exchange.native_push) is not None:

            def counted(outgoing: Tensor, pushes: Sequence[Any], word: int) -> None:
                noted["flags"] += sum(chunks for *_, chunks in pushes)
                push(outgoing, pushes, word)

            exchange.native_push = counted
        return exchange

    computing = _Stream(noted)
    with (
        patch.object(c10d, "processors_of", lambda device: target.processors),
        patch.object(backends, "backend", "triton"),
        patch.object(select, "requested_transport", transport),
        patch.object(FlagKernels, "adds", lambda self, like: True),
        patch.object(torch.accelerator, "current_stream", lambda device: computing),
        patch.dict(select.openers, symmetric=open_counted),
        launch.recording(target) as launches,
    ):
        yield launches


class CountedExchange(symmetric.SymmetricExchange):
    """Over memory that is none."""

    def look(self) -> None:
        """A copy in every 64th call, which is not counted."""

    def close(self) -> None:
        self.let_go()


class _Handle:
    """Stands for torch's `_SymmetricMemory`."""

    native_words = True  # the extension writes none where there is no memory

    def __init__(self, group: dist.ProcessGroup, noted: Counter[str]) -> None:
        self.rank, self.world_size, self._noted = group.rank(), group.size(), noted

    def get_buffer(self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(sizes, dtype=dtype, device="meta")

    def barrier(self, channel: int, timeout_ms: int) -> None:
        self._noted["other_kernels"] += 1

    def stream_write_value32(self, words: Tensor, offset: int, value: int) -> None:
        self._noted["flags"] += 1


class _Stream:
    """Stands for a stream of a GPU."""

    def __init__(self, noted: Counter[str]) -> None:
        self._noted = noted

    def wait_stream(self, other: object) -> None:
        self._noted["waits"] += 1

    wait_event = wait_stream

    def record_event(self) -> object:
        return self

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def count(case: str, transport: str, tokens: int, ranks: int, width: int, overlap: bool = True) -> Count:
    """One call of a layer of `width`, its features split over the ranks, in bf16."""
    kind, direction = case.split()
    features = FEATURES[width] // ranks
    meta: dict[str, Any] = {"device": "meta", "dtype": torch.bfloat16}
    op, leaf, weight = (
        (column_linear, torch.empty(tokens // ranks, width, **meta), torch.empty(features, width, **meta))
        if kind == "column"
        else (row_linear, torch.empty(tokens, features, **meta), torch.empty(width, features, **meta))
    )
    noted: Counter[str] = Counter()
    with group_of(ranks) as group, standing_in_for(H100, transport, noted) as launches:
        leaf.requires_grad_(), weight.requires_grad_()

        def forward() -> Tensor:
            return op(leaf, weight, None, group, sequence_parallel=True, overlap=overlap)

        y = forward()
        dy = torch.empty_like(y)

        def backward() -> object:
            return torch.autograd.grad(y, [leaf, weight], dy, retain_graph=True)

        run: Callable[[], object] = forward if direction == "forward" else backward
        for _ in range(2):  # the first agree and choose
            run()
        launches.clear()
        noted.clear()
        before = group.launched
        with _Copies(noted):
            run()
        ours = [launch.kernel.__name__ for launch in launches]
        products = sum(name.endswith(PRODUCTS) for name in ours)
        return Count(
            collectives=group.launched - before,
            products=products,
            other_kernels=len(ours) - products + noted["other_kernels"],
            copies=noted["copies"],
            flags=noted["flags"],
            waits=noted["waits"],
        )


class _Copies(TorchDispatchMode):
    """Counts copies between tensors."""

    def __init__(self, noted: Counter[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._noted = noted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._noted["copies"] += func.overloadpacket.__name__ == "copy_"
        return func(*args, **(kwargs or {}))
