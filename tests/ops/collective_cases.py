"""What ranks run in tests of collectives, which GPUs use: on gloo, and on a group that only takes notes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from tests.ops import region_cases
from tests.ops.parallel_behaviour import message_of, operands_of, with_gradients
from tests.ops.transport_cases import using
from tpkernels.comm import schedule
from tpkernels.comm.calls import GroupCalls, begin
from tpkernels.comm.schedule import bounds
from tpkernels.comm.transports import c10d, rows
from tpkernels.comm.transports.base import Exchange
from tpkernels.comm.transports.c10d import C10D, Collectives
from tpkernels.comm.transports.host import HostExchange
from tpkernels.comm.transports.rows import Gathering, Reducing, all_reducing
from tpkernels.dispatch import backends, primitives
from tpkernels.ops import column_linear, row_linear
from tpkernels.ops.tensor_parallel import parallel, ways
from tpkernels.ops.tensor_parallel.flag_waits import KERNEL_SUMS, waits_for
from tpkernels.ops.tensor_parallel.parallel_mlp import parallel_mlp


@contextmanager
def collectives(rounds: int | None) -> Iterator[None]:
    """c10d goes as on GPUs, in so many rounds; None: as on the CPU."""
    with ExitStack() as patches:
        if rounds is not None:
            patches.enter_context(patch.object(c10d, "_processors", lambda device: 132))
            patches.enter_context(patch.object(c10d, "collective_rounds", lambda *sizes: rounds))
        yield


def wrong_moves(rounds: int, dtypes: list[torch.dtype]) -> list[str]:
    """Gathers, reduces and all-reduces that differ by a bit from those point to point."""
    group, wrong = dist.group.WORLD, []
    rank, ranks = group.rank(), group.size()
    exchange = Collectives(rounds)
    for (count, cols), dtype in product([(32, 6), (7, 3), (1, 5), (0, 4), (8, 0)], dtypes):
        torch.manual_seed(rank)
        partial, bias = torch.randn(count, cols).to(dtype), torch.ones(cols).to(dtype)
        own = partial[slice(*bounds(count, ranks, rank))]

        def moved(exchange: Any, partial: Tensor = partial, own: Tensor = own, bias: Tensor = bias) -> Any:
            (count, cols), part = partial.shape, partial.__getitem__
            gathering, reducing, arriving, summing = (begin("op", f"{n}", group) for n in range(4))
            one = Collectives(1) if exchange is not C10D else C10D
            full = torch.empty_like(partial)
            for where, arrived in Gathering(arriving, own, count, exchange).arrivals():
                full[where] = arrived
            return {
                "gather": Gathering(gathering, own, count, exchange).wait(),
                "arrivals": full,
                "reduce": Reducing(reducing, part, count, cols, partial, bias, exchange).wait(),
                "sum": all_reducing(summing, part, count, cols, partial, bias, exchange, one).wait(),
            }

        ours, expected = moved(exchange), moved(C10D)
        wrong += [
            f"{name} of {(count, cols)} {dtype}"
            for name in ours
            if not torch.equal(ours[name], expected[name])
        ]
    return wrong


def whole(*shape: int) -> Tensor:
    """Numbers that are exact in any order of sums."""
    return torch.randint(-2, 3, shape).float()


def ops_of(sequence_parallel: bool, overlap: bool) -> dict[str, Callable[[], list[Tensor]]]:
    """Each op's results and gradients, in numbers that no order of products changes."""
    group, options = dist.group.WORLD, {"sequence_parallel": sequence_parallel, "overlap": overlap}
    torch.manual_seed(3)
    ranks, rank = group.size(), group.rank()
    x, w, w2, gate = whole(16, 12), whole(16, 12), whole(12, 16), whole(16, 12)
    tokens = x.chunk(ranks)[rank] if sequence_parallel else x
    up, down, gates = w.chunk(ranks)[rank], w2.chunk(ranks, 1)[rank], gate.chunk(ranks)[rank]

    def mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return parallel_mlp(x, up, None, down, None, group, activation="relu2", **options)

    return {
        "column": lambda: with_gradients(
            lambda x, w, b: column_linear(x, w, b, group, **options), [tokens, up, whole(len(up))]
        ),
        "columns": lambda: with_gradients(
            lambda x, *ws: torch.cat(column_linear(x, list(ws), None, group, **options), 1),
            [tokens, up, gates],
        ),
        "row": lambda: with_gradients(
            lambda x, w, b: row_linear(x, w, b, group, **options),
            [x[:, : 16 // ranks].contiguous(), w2[:, : 16 // ranks].contiguous(), whole(12)],
        ),
        "mlp": lambda: with_gradients(mlp, [tokens, up, down]),
    }


def wrong_ops(rounds: int, sequence_parallel: bool, overlap: bool) -> list[str]:
    """Ops whose bits differ from those of today's exchange."""
    wrong = []
    for name, op in ops_of(sequence_parallel, overlap).items():
        with collectives(None):
            torch.manual_seed(5)
            expected = op()
        with collectives(rounds):
            torch.manual_seed(5)
            found = op()
        if not all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)):
            wrong.append(name)
    return wrong


def wrong_regions(rounds: int) -> list[str]:
    """Regions that do not mean what they say."""
    with collectives(rounds):
        return region_cases.wrong_regions([(8, 4), (12,), (4, 0)], [torch.bfloat16, torch.int64])


def sums_of_kernels() -> list[str]:
    """What the kernel sums otherwise than torch does."""
    group, wrong = dist.group.WORLD, []
    ranks = group.size()
    with patch.object(backends, "backend", "triton"):
        for (count, cols), dtype in product(
            [(16, 6), (7, 3), (64, 1), (0, 4)], [torch.float32, torch.bfloat16]
        ):
            torch.manual_seed(group.rank())
            partial = torch.randn(count, cols).to(dtype)
            for bias in (None, torch.ones(cols).to(dtype)):
                waits = waits_for("op", Collectives(1), partial)
                assert waits is KERNEL_SUMS
                assert waits_for("op", C10D, partial) is not KERNEL_SUMS
                totals = [
                    Reducing(
                        begin("op", "sum", group),
                        partial.__getitem__,
                        count,
                        cols,
                        partial,
                        bias,
                        Collectives(1),
                        waiting,
                    ).wait()
                    for waiting in (waits, rows.HOST_WAITS)
                ]
                if not torch.equal(*totals):
                    wrong.append(f"{(count, cols)} {dtype} of {ranks}")
    return wrong


def dies(rounds: int) -> None:
    with collectives(rounds):
        block = ops_of(True, True)["column"]
        block()
        if dist.get_rank() == 1:
            os._exit(7)
        block()


def backend_summed(scatter: bool) -> tuple[list[float], list[float], str]:
    """A sum by the backend, today's, and what is said where tensors lie on the CPU."""
    group = dist.group.WORLD
    torch.manual_seed(group.rank())
    x, w, _ = operands_of(group.rank())
    x = torch.randn(16, 8)

    def y() -> Tensor:
        return row_linear(x, w[:, :8], torch.ones(len(w)), group, sequence_parallel=scatter)

    expected = y()
    with patch.object(parallel, "backend_sums", True):
        refused = message_of(y)
        with patch.object(parallel, "require_backend_sums", lambda *_: None):
            found = y()
    return found.flatten().tolist(), expected.flatten().tolist(), refused


def options_differ() -> str:
    """One rank alone lets the backend sum, on a backend without tags."""
    group, ours = dist.group.WORLD, dist.get_rank() == 1
    with (
        patch.object(parallel, "backend_sums", ours),
        patch.object(parallel, "require_backend_sums", lambda *_: None),
        patch.object(GroupCalls, "matches_tags", lambda self, device: False),
        collectives(1),
    ):
        x = torch.randn(4, 8)
        column_linear(x, x, None, group, sequence_parallel=True)  # now all agree on the transport
        return message_of(lambda: row_linear(x, x, None, group, sequence_parallel=True))


def rounds_differ() -> str:
    """Weight shards of two sizes, of which one fills a GPU often enough, on a backend without tags."""
    group, rank = dist.group.WORLD, dist.get_rank()
    with (
        patch.object(GroupCalls, "matches_tags", lambda self, device: False),
        collectives(1 + rank),
    ):
        x = torch.randn(4, 8)
        return message_of(lambda: column_linear(x, x, None, group, sequence_parallel=True))


def messages(transport: str, overlap: bool) -> tuple[list[int], list[int], bool]:
    """To whom a gather and a reduce of four chunks a shard send, and whether these are right."""
    group, sent = dist.group.WORLD, list[int]()
    ranks, rank = group.size(), group.rank()
    owner, name = (HostExchange, "put") if transport == "shared" else (c10d.Transfers, "exchange")
    original = getattr(owner, name)

    def counted(self: Any, to: int, *arguments: Any) -> Any:
        travels = isinstance(arguments[0], slice) or arguments[0].numel()
        sent.extend([to] if to != rank and travels else [])
        return original(self, to, *arguments)

    x, w, found, right = torch.full((4, 8), rank + 1.0), torch.eye(8), [], True
    ops = [
        (column_linear, x, torch.cat([torch.full((4, 8), r + 1.0) for r in range(ranks)])),
        (row_linear, x.repeat(ranks, 1), torch.full((4, 8), ranks * (ranks + 1) / 2)),
    ]
    with using(transport), patch.object(schedule, "LEAST_BYTES", 32):
        for op, argument, expected in ops:
            for _ in range(2):  # exchanges are opened by the first
                sent.clear()
                with patch.object(owner, name, counted):
                    y = op(argument, w, None, group, sequence_parallel=True, overlap=overlap)
            found.append(sorted(sent))
            right = right and torch.equal(y, expected)
    return found[0], found[1], right


class Work:
    """One that is done; waiting for it is noted."""

    def __init__(self, notes: list[str], name: str) -> None:
        self._notes, self._name = notes, name

    def wait(self) -> None:
        self._notes.append(f"await {self._name}")


class Noting(dist.ProcessGroup):
    """A group of many ranks, of which one is here. It notes launches, as NCCL makes them; nothing travels."""

    group_name = "noting"  # type: ignore[assignment]
    supports_coalescing = True

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__(rank, ranks)
        self.notes: list[str] = []
        self._coalesced: list[str] = []

    def name(self) -> str:
        return "gloo"  # so that ranks need not compare

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def _launch(self, name: str) -> Work:
        self.notes.append(name)
        return Work(self.notes, name)

    def _allgather_base(self, gathered: Tensor, part: Tensor, options: Any) -> Any:
        assert gathered.shape[0] == self.size() * part.shape[0]
        return self._launch("all_gather")

    def alltoall_base(
        self, received: Tensor, sent: Tensor, received_rows: list[int], sent_rows: list[int], options: Any
    ) -> Any:
        assert (sum(received_rows), sum(sent_rows)) == (received.shape[0], sent.shape[0])
        return self._launch("all_to_all")

    def allreduce(self, tensors: Any, options: Any) -> Any:
        return self._launch("all_reduce")

    def _reduce_scatter_base(self, shard: Tensor, data: Tensor, options: Any) -> Any:
        return self._launch("reduce_scatter")

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Any:
        self._coalesced.append("send")

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Any:
        self._coalesced.append("recv")

    def _start_coalescing(self, device: torch.device) -> None:
        assert not self._coalesced

    def _end_coalescing(self, device: torch.device) -> Any:
        launched = f"{self._coalesced.count('send')} sends, {self._coalesced.count('recv')} receives"
        self._coalesced.clear()
        return self._launch(launched)


@contextmanager
def noting(ranks: int) -> Iterator[Noting]:
    """A group on which ops of tensors without memory are noted: launches, waits, products and sums."""
    group = Noting(1, ranks)

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*arguments: Any) -> Any:
            multiplied = arguments[1 if name == "wgrad_accumulate_" else 0]
            group.notes.append(f"{name.split('_')[0]} {multiplied.shape[0]}")
            return function(*arguments)

        return call

    into = primitives.into

    def note_into(primitive: Callable[..., Any], out: list[Tensor], x: Tensor, *others: Any) -> None:
        group.notes.append(f"{primitive.__name__.split('_')[0]} {x.shape[0]}")
        into(primitive, out, x, *others)

    def exchange_for(
        op: str,
        purpose: str,
        like: Tensor,
        rows: int,
        cols: int,
        group: dist.ProcessGroup,
        features: int = 0,
        overlap: bool = True,
        **_: object,
    ) -> Exchange:
        return c10d.c10d_for(like, rows, features, group.size(), overlap)

    def note_sum(slots: Tensor, bias: Tensor | None) -> Tensor:
        group.notes.append("sum")
        return slots[0]

    with ExitStack() as patches:
        for name in ("linear", "dgrad", "wgrad", "wgrad_accumulate_", "dgrad_act"):
            patches.enter_context(patch.object(primitives, name, noted(name, getattr(primitives, name))))
        for target, name, value in [
            (primitives, "into", note_into),
            (c10d, "_processors", lambda device: 132),
            (rows, "sum_of_slots", note_sum),
            (parallel, "exchange_for", exchange_for),
            (ways, "exchange_for", exchange_for),
        ]:
            patches.enter_context(patch.object(target, name, value))
        patches.enter_context(patch.dict(distributed_c10d._world.pg_map, {group: ("nccl", None)}))
        yield group
