"""c10d as GPUs use it: the bits of today's exchange on gloo, and what is launched, in which order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from tests.comm.counting import CountingGroup
from tests.on_ranks import on_ranks
from tests.ops.parallel_behaviour import message_of, operands_of
from tests.ops.parallel_cases import Setting, assert_within, run_all
from tests.ops.test_mappings import assert_regions_mean_what_they_say
from tests.ops.transport_cases import using
from tests.products import pairwise
from tpkernels.comm import schedule, tensor_parallel
from tpkernels.comm.calls import Call, Calls, begin, calls_of
from tpkernels.comm.groups import start_together
from tpkernels.comm.schedule import bounds
from tpkernels.comm.tensor_parallel import TensorParallel
from tpkernels.comm.transports import c10d, select
from tpkernels.comm.transports.c10d import Collectives
from tpkernels.comm.transports.host import HostExchange
from tpkernels.comm.transports.rows import Terms
from tpkernels.dispatch import backends, primitives
from tpkernels.ops import column_linear, row_linear
from tpkernels.ops.tensor_parallel import mappings
from tpkernels.ops.tensor_parallel.flag_waits import FLAG_KERNELS
from tpkernels.ops.tensor_parallel.parallel_mlp import parallel_mlp


@contextmanager
def collectives(rounds: int | None) -> Iterator[None]:
    """c10d goes as on GPUs, in so many rounds; None: as on the CPU."""
    if rounds is None:
        yield
    else:
        with (
            patch.object(Calls, "has_tags", lambda self, device: False),
            patch.object(c10d, "processors_of", lambda device: 132),
            patch.object(c10d, "collective_rounds", lambda *sizes: rounds),
        ):
            yield


def results_by_collectives(rounds: int, name: str, settings: Sequence[Setting]) -> list[dict[str, float]]:
    with collectives(rounds):
        return run_all(name, settings)


@on_ranks(2)
def test_regions_go_by_collectives():
    for rounds in (1, 2):
        with collectives(rounds):
            assert_regions_mean_what_they_say([(8, 4), (12,), (4, 0)], [torch.bfloat16, torch.int64])


@pytest.mark.parametrize("world", ["ranks2", "ranks4"])
@on_ranks()
def test_one_kernel_sums_to_the_bits_of_torch():
    group = dist.group.WORLD
    sizes, dtypes = [(16, 6), (7, 3), (64, 1), (0, 4)], [torch.float32, torch.bfloat16]
    with patch.object(backends, "backend", "triton"):
        for (count, cols), dtype, has_bias in product(sizes, dtypes, (False, True)):
            torch.manual_seed(group.rank())
            partial = torch.randn(count, cols).to(dtype)
            bias, terms = torch.ones(cols).to(dtype), Terms(count, cols, partial, partial.__getitem__)
            totals = []
            for kernels in (FLAG_KERNELS, None):
                call, added = begin("op", "sum", group), bias if has_bias else None
                totals.append(Collectives(1, kernels).reduce(call, terms, added, at_once=False).wait())
            assert torch.equal(*totals), f"{(count, cols)} {dtype}"


@pytest.mark.parametrize("scatter", [True, False])
@on_ranks(2)
def test_the_backend_sums_if_it_is_told_to(scatter):
    """It is refused where tensors lie on the CPU."""
    x, w, _ = operands_of(dist.get_rank())
    x = torch.randn(16, 8)

    def y() -> Tensor:
        return row_linear(x, w[:, :8], torch.ones(len(w)), dist.new_group(), sequence_parallel=scatter)

    expected = y()
    with patch.object(tensor_parallel, "backend_sums", "1"):
        with pytest.raises(ValueError, match=r"^row_linear: TPKERNELS_BACKEND_SUMS=1 leaves sums of tensors"):
            y()
        with patch.object(tensor_parallel, "require_backend_sums", lambda *_, **__: None):
            torch.testing.assert_close(y(), expected, rtol=1e-5, atol=1e-5)


@on_ranks(2)
def test_ranks_that_differ_in_who_sums_or_in_how_rows_are_cut_are_refused():
    """The backend sums on one rank; one shard of the weight fills a GPU often enough. Calls bear no tags."""
    rank, x = dist.get_rank(), torch.randn(4, 8)
    shards, gather = "row_linear: shards of the sum", "column_linear: gather of x"
    for op, sums, rounds, words in (
        (row_linear, str(rank), 1, (f"{shards} (4, 4)", f"{shards} by the backend (4, 4)")),
        (column_linear, "0", 1 + rank, (f"{gather} (4, 8)", f"{gather} in 2 rounds (4, 8)")),
    ):
        group = dist.new_group()
        with (
            patch.object(tensor_parallel, "backend_sums", sums),
            patch.object(tensor_parallel, "require_backend_sums", lambda *_, **__: None),
            collectives(rounds),
        ):
            if op is row_linear:  # now all agree on the transport
                column_linear(x, x, None, group, sequence_parallel=True)
            message = message_of(lambda: op(x, x, None, group, sequence_parallel=True))  # noqa: B023
        for of_rank, said in enumerate(words):
            assert f"rank {of_rank} has {said}" in message, message


@pytest.mark.parametrize(("most", "gathers"), [(0, 2), (2**20, 1)])
@on_ranks(2)
def test_rows_of_one_message_are_gathered_once(most, gathers):
    """Of more rows only the shard is kept, and backward gathers it again; numbers are the same."""
    group, started, original = dist.new_group(), list[str](), TensorParallel.gather
    calls_of(group).eager_bytes = most

    def gather(self: TensorParallel, op: str, name: str, *arguments: Any, **options: Any) -> Any:
        started.append(name)
        return original(self, op, name, *arguments, **options)

    x, w = (torch.randn(8, 8).requires_grad_() for _ in range(2))
    with patch.object(TensorParallel, "gather", gather):
        y = column_linear(x, w, None, group, sequence_parallel=True)
        found = torch.autograd.grad(y.square().sum(), (x, w))
    assert started == ["x"] * gathers
    y = column_linear(x, w, None, group, sequence_parallel=True, save_gathered=True)
    for one, kept in zip(found, torch.autograd.grad(y.square().sum(), (x, w)), strict=True):
        torch.testing.assert_close(one, kept, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("transport", ["c10d", "shared"])
@on_ranks(4)
def test_without_overlap_each_peer_gets_one_message(transport):
    """With it, there are four chunks to a shard; in both, a gather and a reduce are right."""
    group, sent = dist.group.WORLD, list[int]()
    ranks, rank = group.size(), group.rank()
    owner, name = (HostExchange, "put") if transport == "shared" else (Call, "send")
    original = getattr(owner, name)
    peers = [peer for peer in range(4) if peer != rank]

    def counted(self: Any, *arguments: Any) -> Any:
        (to,) = [argument for argument in arguments if isinstance(argument, int)]
        sent.extend([to] if to != rank else [])
        return original(self, *arguments)

    x, w = torch.full((4, 8), rank + 1.0), torch.eye(8)
    ops = [
        (column_linear, x, torch.cat([torch.full((4, 8), r + 1.0) for r in range(ranks)])),
        (row_linear, x.repeat(ranks, 1), torch.full((4, 8), ranks * (ranks + 1) / 2)),
    ]
    with using(transport), patch.object(schedule, "LEAST_BYTES", 32):
        for overlap, (op, argument, expected) in product((False, True), ops):
            for _ in range(2):  # exchanges are opened by the first
                sent.clear()
                with patch.object(owner, name, counted):
                    y = op(argument, w, None, group, sequence_parallel=True, overlap=overlap)
            assert y.equal(expected)
            if not overlap:
                assert sorted(sent) == peers
            elif op is column_linear:
                assert len(sent) == 4 * len(peers)


@contextmanager
def noting(ranks: int) -> Iterator[CountingGroup]:
    """A group on which ops of tensors without memory are noted: launches, waits, products and sums."""
    group = CountingGroup(1, ranks)

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*arguments: Any) -> Any:
            group.notes.append(f"{name} {arguments[0].shape[0]}")
            return function(*arguments)

        return call

    into = primitives.into

    def note_into(primitive: Callable[..., Any], out: list[Tensor], x: Tensor, *others: Any) -> None:
        group.notes.append(f"{primitive.__name__.split('_')[0]} {x.shape[0]}")
        into(primitive, out, x, *others)

    def note_sum(slots: Tensor, bias: Tensor | None, *, tree: bool) -> Tensor:
        group.notes.append("sum")
        return slots[0]

    with ExitStack() as patches:
        products = ("linear", "dgrad", "wgrad")
        for target, name, value in [
            *((primitives, name, noted(name, getattr(primitives, name))) for name in products),
            (primitives, "into", note_into),
            (c10d, "processors_of", lambda device: 132),
            (c10d, "add_up", note_sum),
            (select, "requested_transport", "c10d"),
        ]:
            patches.enter_context(patch.object(target, name, value))
        patches.enter_context(patch.dict(distributed_c10d._world.pg_map, {group: ("nccl", None)}))
        yield group


Rows = dict[str, Tensor]
WAYS = [(True, True), (False, True), (True, False)]  # whether tokens are split, and transfers hidden
WORLDS = [("ranks2", 1), ("ranks2", 2), ("ranks4", 1), ("ranks4", 2), ("ranks4", 4)]
T, K, N, R = 8192, 4096, 1792, 8


@pytest.mark.parametrize(("world", "rounds"), WORLDS)
@on_ranks()
def test_rows_move_as_they_do_point_to_point(rounds):
    """Gathers, reduces and all-reduces, to the bit."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    by_collectives, by_messages = (TensorParallel(dist.new_group()) for _ in range(2))
    sizes = [(32, 6), (7, 3), (1, 5), (0, 4), (8, 0)]
    for (count, cols), dtype in product(sizes, [torch.float32, torch.bfloat16, torch.float64, torch.int64]):
        torch.manual_seed(rank)
        partial, bias = torch.randn(count, cols).to(dtype), torch.ones(cols).to(dtype)
        own = partial[slice(*bounds(count, ranks, rank))]

        def moved(
            tp: TensorParallel, partial: Tensor = partial, own: Tensor = own, bias: Tensor = bias
        ) -> Any:
            count, cols = partial.shape
            terms, full = Terms(count, cols, partial, partial.__getitem__), torch.empty_like(partial)
            for where, arrived in tp.gather("op", "x", own, rows=count, everywhere=True):
                full[where] = arrived
            return {
                "gather": tp.gather("op", "x", own, rows=count, everywhere=True).all(),
                "arrivals": full,
                "reduce": tp.reduce_scatter("op", terms, bias).wait(),
                "sum": tp.all_reduce("op", terms, bias).wait(),
            }

        with collectives(rounds):
            ours = moved(by_collectives)
        with patch.object(schedule, "LEAST_BYTES", 64):
            expected = moved(by_messages)
        for name, rows_moved in ours.items():
            assert rows_moved.equal(expected[name]), f"{name} of {(count, cols)} {dtype}"


@pairwise(place=["2 ranks, 1 round", "2 ranks, 2 rounds", "4 ranks, 4 rounds"], name=["column", "row", "mlp"])
def test_ops_give_the_unsharded_numbers(request, place, name):
    ranks, rounds = request.getfixturevalue(f"ranks{place[0]}"), int(place[9])
    activation = "swiglu" if name == "mlp" else None
    settings = [Setting(activation=activation, sequence_parallel=p, overlap=o) for p, o in WAYS]
    assert_within(ranks.run(results_by_collectives, rounds, name, settings), settings)


def leaf(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, device="meta", dtype=torch.bfloat16, requires_grad=True)


def launched(group: CountingGroup) -> list[str]:
    """Since the last look."""
    found, group.notes = group.notes, []
    return found


@pytest.mark.parametrize("overlap", [True, False])
def test_column_is_one_gather_and_one_product(overlap):
    with noting(R) as group:
        y = column_linear(leaf(T // R, K), leaf(N, K), None, group, sequence_parallel=True, overlap=overlap)
        assert launched(group) == ["all_gather", "await all_gather", f"linear {T}"]
        y.backward(torch.empty_like(y))
        multiplied, summed = ["await all_gather", f"wgrad {T}"], ["await all_to_all", "sum"]
        # with overlap the gather travels behind dgrad, the reduce behind wgrad
        last = [*multiplied, *summed] if overlap else [*summed, *multiplied]
        assert launched(group) == ["all_gather", f"dgrad {T}", "all_to_all", *last]


def test_row_is_cut_in_two_where_each_half_fills_the_gpu():
    with noting(R) as group:
        y = row_linear(leaf(T, N), leaf(K, N), None, group, sequence_parallel=True)
        half = [f"linear {T // 2}", "all_to_all"]
        assert launched(group) == [*half, *half, "await all_to_all", "await all_to_all", "sum"]
        y.backward(torch.empty_like(y))
        assert launched(group)[:2] == ["all_gather", "await all_gather"]
        row_linear(leaf(T, N), leaf(K, N), None, group, sequence_parallel=True, overlap=False)
        assert launched(group) == [f"linear {T}", "all_to_all", "await all_to_all", "sum"]


def test_rounds_of_a_gather_are_launched_before_the_first_product():
    with noting(R) as group, torch.no_grad():
        column_linear(leaf(T // R, K), leaf(2 * N, K), None, group, sequence_parallel=True)
        rounds = ["3 sends, 3 receives", "4 sends, 4 receives"]
        half = f"linear {T // 2}"
        assert launched(group) == [*rounds, f"await {rounds[0]}", half, f"await {rounds[1]}", half]


def test_all_reduce_is_a_reduce_and_a_gather():
    with noting(R) as group, torch.no_grad():
        for overlap, pieces in [(True, 2), (False, 1)]:
            row_linear(leaf(T, N), leaf(K, N), None, group, overlap=overlap)
            reduced = [f"linear {T // pieces}", "all_to_all"] * pieces + ["await all_to_all"] * pieces
            assert launched(group) == [*reduced, "sum", "all_gather", "await all_gather"]
    with noting(2) as group, torch.no_grad():  # as many bytes, in one step
        row_linear(leaf(2048, N), leaf(1024, N), None, group)
        assert launched(group) == ["linear 2048", "all_gather", "await all_gather", "sum"]


def test_a_message_alone_is_a_launch_too():
    """Its receiver may be in a launch of several."""
    group = CountingGroup(0, 2)
    start_together(group, torch.device("cpu"), [lambda group: group.send([], 1, 0)])
    assert group.notes == ["1 sends, 0 receives"]


def test_mlp_hides_its_transfers():
    with noting(R) as group:
        y = parallel_mlp(leaf(T // R, K), leaf(N, K), None, leaf(K, N), None, group, sequence_parallel=True)
        launched(group)
        y.backward(torch.empty_like(y))
        notes = launched(group)
    assert [note for note in notes if not note.startswith("await")][:2] == ["all_gather", "all_gather"]
    assert notes.index("all_to_all") < len(notes) - 1 - notes[::-1].index(f"wgrad {T}")
    assert notes[-2:] == ["await all_to_all", "sum"]
    assert len([note for note in notes if note.startswith("all")]) == 3


def test_a_region_is_one_collective():
    x = torch.empty(T, K, device="meta")
    with noting(R) as group, torch.no_grad():
        mappings.gather_from_sequence_region(x, group)
        assert launched(group) == ["all_gather", "await all_gather"]
        mappings.reduce_scatter_to_sequence_region(x, group)
        reduced = ["all_to_all", "await all_to_all", "sum"]
        assert launched(group) == reduced
        mappings.reduce_from_region(x, group)
        assert launched(group) == [*reduced, "all_gather", "await all_gather"]


def test_the_backend_sums_in_one_launch(monkeypatch):
    monkeypatch.setattr(tensor_parallel, "backend_sums", "1")
    monkeypatch.setattr(tensor_parallel, "require_backend_sums", lambda *_, **__: None)
    with noting(R) as group, torch.no_grad():
        row_linear(leaf(T, N), leaf(K, N), None, group, sequence_parallel=True)
        assert launched(group) == [f"linear {T}", "reduce_scatter", "await reduce_scatter"]
        row_linear(leaf(T, N), leaf(K, N), None, group)
        assert launched(group) == [f"linear {T}", "all_reduce", "await all_reduce"]
