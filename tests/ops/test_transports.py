"""Ops whose rows move through memory with flags: the numbers of c10d, and errors instead of hangs."""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.loopback import start
from tests.ops import parallel_behaviour as behaviour
from tests.ops import test_exchanges as exchanges
from tests.ops import test_vocab_behaviour as vocab
from tests.ops.parallel_behaviour import block, meet, message_of, operands_of, with_gradients
from tests.ops.parallel_cases import Setting, assert_within, prepare, run_all
from tests.ops.test_collectives import collectives
from tests.ops.test_parallel_citizens import model_unlike_compiled
from tests.ops.transport_cases import be_impatient, open_exchanges, open_stand_in, pushers, under, using
from tests.patience import patient
from tests.products import once
from tests.ranks import COLLECTIVE_SECONDS, FORKED, RankFailure, RankPool
from tpkernels import Recipe
from tpkernels.comm.transports import mailbox
from tpkernels.comm.transports import rows as rows_in_flight
from tpkernels.comm.transports import select as transports
from tpkernels.comm.transports.c10d import Transfers
from tpkernels.comm.transports.mailbox import Opening
from tpkernels.comm.transports.memory import Layout
from tpkernels.comm.transports.order import CallOrder
from tpkernels.kernels import gather_linear
from tpkernels.ops.tensor_parallel.column_linear import column_linear
from tpkernels.ops.tensor_parallel.flag_waits import KERNEL_WAITS
from tpkernels.ops.tensor_parallel.row_linear import row_linear

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="these kernels run in the interpreter")

WAYS = {
    "shared torch": ("shared", "torch"),
    "shared triton": ("shared", "triton"),
    "stand-in": ("stand-in", "triton"),
}
PLACES = {
    "2 shared torch": ("ranks2", "shared", "torch"),
    "2 shared triton": ("ranks2", "shared", "triton"),
    "2 stand-in": ("ranks2", "stand-in", "triton"),
    "4 shared torch": ("ranks4", "shared", "torch"),
    "4 shared triton": ("ranks4", "shared", "triton"),
    "4 shared apart": ("ranks4", "shared apart", "torch"),
    "4 shared alone": ("ranks4", "shared alone", "triton"),
    "4 stand-in apart": ("ranks4", "stand-in apart", "triton"),
    "2 stand-in apart": ("ranks2", "stand-in apart", "triton"),
}
ACTIVATIONS = {"column": ["gelu", None], "row": [None], "mlp": ["gelu", "swiglu"]}


@once(place=PLACES, name=list(ACTIVATIONS))
def test_ops_give_the_unsharded_numbers(request, place, name):
    world, transport, backend = place
    ranks = request.getfixturevalue(world)
    first, *_, last = ACTIVATIONS[name] * 2
    settings = [
        Setting(activation=first, main_grad=True),
        Setting(torch.bfloat16, activation=last, leading=(8, 3)),
        Setting(torch.float16, overlap=False, activation=first),
        Setting(sequence_parallel=False, activation=last, main_grad=True),
    ]
    if name == "column":
        settings.append(Setting(save_gathered=True, bias=False, activation="relu2"))
    if backend == "torch":
        settings += [Setting(torch.float64, parallel, activation=last) for parallel in (False, True)]
    elif ranks.world_size == 4:
        settings = settings[::3]  # what two ranks prove of dtypes; four spin on two cores
    assert_within(ranks.run(under, transport, backend, run_all, name, settings), settings)


def differs_from_c10d_by(transport: str, backend: str, sequence_parallel: bool) -> float:
    prepare(Setting())
    operands = operands_of(0)
    group = dist.new_group()
    with using("c10d", backend):
        expected = with_gradients(
            lambda *t: block(*t, sequence_parallel=sequence_parallel, group=group), operands
        )
    with using(transport, backend):
        found = with_gradients(block, operands, sequence_parallel=sequence_parallel)
        assert {exchange.timeout for exchange in open_exchanges()} == {COLLECTIVE_SECONDS}  # the group's
    return max(float((x - y).norm() / y.norm()) for x, y in zip(found, expected, strict=True))


@once(way=WAYS, sequence_parallel=[True, False])
def test_numbers_of_c10d_within_rounding(ranks2, way, sequence_parallel):
    assert max(ranks2.run(differs_from_c10d_by, *way, sequence_parallel)) < 1e-6


@pytest.mark.parametrize(
    ("world", "transport", "backend", "sequence_parallel", "rounds"),
    [
        ("ranks2", "shared", "triton", True, 1),
        ("ranks2", "shared", "triton", False, 1),
        ("ranks4", "shared", "torch", True, 3),
        ("ranks4", "shared apart", "torch", True, 2),
        ("ranks4", "shared alone", "torch", False, 2),
        pytest.param("ranks4", "shared", "triton", True, 2, marks=pytest.mark.sweep),
    ],
)
def test_delays_change_no_bit(ranks, transport, backend, sequence_parallel, rounds):
    repeated = behaviour.repeats_are_equal
    assert all(ranks.run(under, transport, backend, repeated, sequence_parallel, "shared", rounds))


def waiting_products() -> tuple[int, int]:
    """Launches of the product that waits, in forward and backward of a block: with overlap, and without."""
    prepare(Setting())
    launches = []
    for overlap in (True, False):
        with patch.object(gather_linear, "gather_linear_fwd", wraps=gather_linear.gather_linear_fwd) as spy:
            with_gradients(block, operands_of(2), sequence_parallel=True, overlap=overlap)
        launches.append(spy.call_count)
    return launches[0], launches[1]


def test_one_kernel_multiplies_while_rows_arrive(ranks2):
    """Forward of column and backward of row: a launch each, and none without overlap."""
    assert ranks2.run(under, "shared", "triton", waiting_products) == [(2, 0)] * 2


def ready_for_a_capture() -> list[bool]:
    """Of each exchange of an all-reduce: whether it has the kernels that count calls."""
    prepare(Setting())
    with_gradients(block, operands_of(4), sequence_parallel=False)
    return [exchange.flag_kernels is not None for exchange in open_exchanges()]


def test_all_exchanges_of_an_all_reduce_are_ready_for_a_capture(ranks2):
    for ready in ranks2.run(under, "stand-in", "triton", ready_for_a_capture):
        assert len(ready) >= 2
        assert all(ready)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_layers_interleave_and_can_be_checkpointed(ranks2, way):
    assert all(ranks2.run(under, *way, behaviour.interleaved_layers_do_not_mix))
    assert ranks2.run(under, *way, behaviour.checkpointed_unlike_plain, False, [None]) == [[], []]


def test_compiled_and_inferred_and_shared_gathers_give_the_same_bits(ranks2):
    run = partial(ranks2.run, under, "shared", "torch")
    assert run(partial(model_unlike_compiled, block, sequence_parallel=True)) == [[], []]
    assert run(behaviour.unlike_with_grad, [None]) == [[], []]
    assert run(behaviour.lists_share_one_gather) == [(True, 0)] * 2


def replayed_calls(with_barrier: bool) -> list[bool]:
    """Whether calls are exact that use one and the same buffer each time, as a replayed graph does."""
    rank, ranks, rows = dist.get_rank(), dist.get_world_size(), 12
    group = dist.group.WORLD
    layout = Layout(ranks, (rows, exchanges.K), torch.float32, 2)
    exchange = open_stand_in(Opening("replay", group, layout, timeout=20.0))
    exchange.flag_kernels = KERNEL_WAITS  # which count and publish in the interpreter here
    exchange.captured = True
    results = []
    for call in range(4):
        exchange.order = CallOrder()  # a replay does not count on the host
        with nullcontext() if with_barrier or not call else patch.object(exchange, "barrier"):
            delivery = start(exchange, [exchanges.shard_of(rank, call, rows)] * ranks)
        time.sleep(0.1 * rank)  # the first rank is far ahead
        results.append(exchanges.gathered_product(delivery, None if with_barrier else 5_000))
    dist.barrier()
    exchange.close()
    return exchanges.gathered_exactly(rank, ranks, rows, results)


def test_replayed_calls_use_one_buffer_and_the_barrier_guards_it(ranks2):
    assert ranks2.run(replayed_calls, True) == [[True] * 4] * 2
    with pytest.raises(RankFailure, match=r"gather_linear on rank \d: chunk \d had not arrived"):
        ranks2.run(replayed_calls, False)  # the fault shows: flags are of another call


def nobody_can_wait() -> list[str]:
    """What is said, call after call, where torch cannot wait for a GPU, and kernels do not take the dtype."""
    messages = []
    for way, dtype in ((("stand-in", "torch"), torch.float32), (("shared", "triton"), torch.float64)):
        x, w = torch.randn(2, 8, dtype=dtype), torch.randn(4, 8, dtype=dtype)
        with using(*way):
            group = dist.new_group()
            messages += [
                message_of(lambda: column_linear(x, w, None, group, sequence_parallel=True))  # noqa: B023
                for _ in range(3)
            ]
    return messages


def test_who_cannot_wait_says_so_before_anything_is_sent(ranks2):
    for messages in ranks2.run(nobody_can_wait):
        assert all(
            "TPKERNELS_BACKEND=torch computes with torch, which cannot wait" in m for m in messages[:3]
        )
        assert all("kernels that wait take bfloat16, float16 and float32" in m for m in messages[3:])


def alone() -> list[bool]:
    """Whether results are finite where nothing may be opened, sent or agreed on."""

    def forbidden(*_: Any) -> None:
        raise AssertionError("a rank alone has nobody to talk to")

    found = []
    with (
        patch.object(transports, "agree", forbidden),
        patch.object(Transfers, "__init__", forbidden),
        patch.object(rows_in_flight, "start_all_gather", forbidden),
    ):
        for transport, split, recipe in product(("auto", "shared"), (True, False), (None, Recipe.rowwise())):
            with using(transport):
                for model in (block, behaviour.mlp):
                    found += with_gradients(model, operands_of(1), sequence_parallel=split, quantize=recipe)
        found += vocab.with_gradients(vocab.model, *vocab.operands(), sequence_parallel=True)
    return [bool(t.isfinite().all()) for t in found]


def test_a_rank_alone_opens_and_sends_nothing(ranks1):
    (found,) = ranks1.run(alone)
    assert found == [True] * len(found)


def rows_that_do_not_divide() -> tuple[list[tuple[int, int]], list[tuple[int, ...]]]:
    """(rows of a piece, its parts) of the open exchanges, then of all that was opened for odd all-reduces."""
    prepare(Setting())  # parts of 64 bytes, four at most
    ranks = dist.get_world_size()
    w = torch.randn(8, 12)
    with using("shared"):
        for rows in (7 * ranks, 6 * ranks, 5 * ranks, 8 * ranks):
            row_linear(torch.randn(rows, 12), w, None, dist.group.WORLD, sequence_parallel=True)
        shapes = [(exchange.shape[0], exchange.splits) for exchange in open_exchanges()]
        for rows in (ranks + 1, 0):
            row_linear(torch.randn(rows, 12), w, None, dist.group.WORLD)
        column_linear(torch.randn(0, 12), w, None, dist.group.WORLD, sequence_parallel=True)
        return shapes, [exchange.shape for exchange in open_exchanges()[len(shapes) :]]


def test_rows_that_do_not_divide_make_fewer_parts_or_go_over_c10d(ranks2):
    for parts, others in ranks2.run(rows_that_do_not_divide):
        assert parts == [(7, 1), (6, 3), (5, 1), (8, 4)]
        assert others == []


def _mappings() -> int:
    maps = Path("/proc/self/maps").read_text().splitlines()
    return sum("memfd:tpkernels" in line for line in maps)


def many_shapes(captured: bool, sizes: Sequence[int]) -> tuple[list[int], int, int]:
    """Rows of what stays open after too many shapes, and the threads and mappings that all of it takes."""
    with using("shared"), patch.object(transports, "MOST_OPEN", 3):
        for rows in sizes:
            x, w = torch.randn(rows, 8), torch.randn(4, 8)
            column_linear(x, w, None, dist.group.WORLD, sequence_parallel=True)
            open_exchanges()[0].captured = captured
        gc.collect()
        return [exchange.shape[0] for exchange in open_exchanges()], pushers(), _mappings()


@pytest.mark.parametrize(("captured", "sizes"), [(False, (1, 2, 3, 1, 4, 5)), (True, (1, 2, 3, 4, 5))])
def test_few_exchanges_stay_open_but_those_used_last_or_written_by_a_graph(ranks2, captured, sizes):
    assert ranks2.run(many_shapes, captured, sizes) == [([1, 4, 5], 3, 3 * 2)] * 2


def ends_with_its_group() -> tuple[int, int, int, int]:
    """Threads and mappings while the group lives and after it is destroyed."""
    group = dist.new_group()
    with using("shared"):
        x, w = torch.randn(2, 8), torch.randn(4, 8)
        column_linear(x, w, None, group, sequence_parallel=True)
        before = pushers(), _mappings()
        dist.barrier()
        dist.destroy_process_group(group)
        del group
        gc.collect()
    return *before, pushers(), _mappings()


def destroyed_but_held() -> str:
    group = dist.new_group()
    with using("shared"):
        x, w = torch.randn(2, 8), torch.randn(4, 8)
        column_linear(x, w, None, group, sequence_parallel=True)
        dist.barrier()
        dist.destroy_process_group(group)
        return message_of(lambda: column_linear(x, w, None, group, sequence_parallel=True))


def test_exchanges_end_with_their_group(ranks2):
    assert ranks2.run(ends_with_its_group) == [(1, 2, 0, 0)] * 2
    for message in ranks2.run(destroyed_but_held):
        assert "was destroyed; make a new one" in message


def refused(how: str) -> str:
    """What a rank says of a wish that cannot be served, or that others do not share."""
    rank = dist.get_rank()
    x, w = torch.randn(4, 8), torch.randn(8, 8)

    def call() -> object:
        return column_linear(x, w, None, dist.group.WORLD, sequence_parallel=True)

    wishes = {
        "misspelt on one rank": "shared" if rank else "share",
        "other wishes": "shared" if rank else "auto",
        "symmetric on the CPU": "symmetric",
        "other shapes": "shared",
    }
    if how == "other shapes":
        x = torch.randn(4 + 4 * rank, 8)
    with using(wishes[how]):
        return message_of(call)


@pytest.mark.parametrize(
    ("how", "words"),
    {
        "misspelt on one rank": ["on rank 0: TPKERNELS_TRANSPORT is 'share'; expected one of auto, c10d"],
        "other wishes": [
            "rank 0 has column_linear with TPKERNELS_TRANSPORT=auto",
            "rank 1 has column_linear",
        ],
        "symmetric on the CPU": [
            "CannotTakePart: column_linear: the gathers of process group '",
            "rank 0 cannot take part: TPKERNELS_TRANSPORT=symmetric exchanges memory of GPUs",
        ],
        "other shapes": [
            "ValueError: column_linear: the gathers of process group '",
            "expected equal arguments on all ranks, got pieces of (",
        ],
    }.items(),
)
def test_what_cannot_be_served_is_an_error_on_every_rank(ranks2, how, words):
    for message in ranks2.run(refused, how):
        assert all(word in message for word in words), message


def peer_dies(transport: str, backend: str, way: str) -> None:
    """In a second call, since from then on only flags tell of a rank on the same machine.

    What is said is raised behind the seconds that it took.
    """
    with using(transport, backend), collectives(2 if way == "collectives" else None):
        operands = operands_of(7)
        if way != "while an exchange opens":
            block(*operands, sequence_parallel=True)
            if way != "killed":  # which is noticed at once
                be_impatient()
            dist.barrier()
        if dist.get_rank() == 1:
            if way == "while an exchange opens":
                mailbox.machine = lambda: os._exit(7)
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        started = time.monotonic()
        message = message_of(lambda: block(*operands, sequence_parallel=True))
        raise RuntimeError(f"{time.monotonic() - started:.1f} s: {message}")


LOST = r"column_linear: rows of rank 1 \(chunk \d\)"
UNREACHABLE = "column_linear: rank 1 cannot be reached"


@pytest.mark.parametrize(
    ("transport", "backend", "way", "words"),
    [
        ("shared", "torch", "later", [LOST]),
        ("shared", "triton", "later", [LOST]),
        ("shared", "torch", "killed", [f"{LOST}.*its process has ended"]),
        # its connections tell, perhaps before anything is asked of it
        ("shared apart", "torch", "later", [LOST, UNREACHABLE]),
        ("shared apart", "triton", "later", [LOST, UNREACHABLE]),
        ("shared", "torch", "while an exchange opens", ["column_linear: r.*rank 1.*process group '"]),
        ("c10d", "torch", "later", ["column_linear: r.*rank 1"]),
        ("c10d", "torch", "collectives", ["column_linear: r.*rank 1 .*process group '"]),
    ],
)
def test_a_dead_rank_is_an_error_that_names_op_rank_and_chunk(transport, backend, way, words):
    with RankPool(2) as own, pytest.raises(RankFailure) as failure:
        own.run(peer_dies, transport, backend, way)
    seconds, _, survivor = str(failure.value.exceptions[0]).partition(" s: RuntimeError: ")
    assert any(re.match(word, survivor, re.DOTALL) for word in words), survivor
    if way == "killed":
        assert float(seconds) < patient(2)


def peer_stays_away(backend: str, op: str) -> tuple[str, float]:
    """What one says whose peer comes too late for a second call, and after how many seconds."""
    group = dist.group.WORLD
    x, w, w2 = operands_of(8)
    calls: dict[str, Callable[[], object]] = {
        "column_linear": lambda: column_linear(x, w, None, group, sequence_parallel=True),
        "row_linear": lambda: row_linear(torch.randn(16, w2.shape[1]), w2, None, group),
    }
    with using("shared", backend):
        calls[op]()
        be_impatient()
        dist.barrier()
        started = time.monotonic()
        message = "late"
        if dist.get_rank() == 0:
            message = message_of(calls[op])
        seconds = time.monotonic() - started
        meet("the late one waits here, alive")
        return message, seconds


@once(backend=["torch", "triton"], op=["column_linear", "row_linear"])
def test_a_late_rank_is_an_error_that_names_op_rank_and_chunk(ranks2, op, backend):
    (message, seconds), late = ranks2.run(peer_stays_away, backend, op)
    assert f"{op}: rows of rank 1 (chunk " in message
    assert 0.3 < seconds < patient(COLLECTIVE_SECONDS)
    assert late[0] == "late"


def call_after_half_a_call() -> str:
    """What is said of an exchange that an error has left with calls begun and never read."""
    with using("shared"):
        x, w = torch.randn(4, 8), torch.randn(8, 8)

        def call() -> object:
            return column_linear(x, w, None, dist.group.WORLD, sequence_parallel=True)

        call()
        (exchange,) = open_exchanges()
        for _ in range(2):
            start(exchange, [x] * exchange.ranks)
        return message_of(call)


def test_an_exchange_with_half_a_call_is_refused(ranks2):
    for message in ranks2.run(call_after_half_a_call):
        assert "has an error ended it? Then destroy the process group" in message


def leave_unread(rank: int, path: str) -> None:
    """Two ranks, of which one still waits for the other to read."""
    dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
    with using("shared"):
        column_linear(torch.randn(2, 8), torch.randn(4, 8), None, dist.group.WORLD, sequence_parallel=True)
        (exchange,) = open_exchanges()
        for _ in range(4 * (rank == 0)):
            exchange.released(exchange.order.begun)
            start(exchange, [torch.zeros(2, 8)] * 2)


def test_processes_end_with_exchanges_open_and_a_push_under_way(tmp_path):
    context = multiprocessing.get_context(FORKED)
    arguments = [(rank, str(tmp_path / "store")) for rank in range(2)]
    ranks = [context.Process(target=leave_unread, args=each, daemon=True) for each in arguments]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(patient(60))
    assert [process.exitcode for process in ranks] == [0, 0]
