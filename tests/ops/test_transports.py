"""Ops over every transport, whoever computes: numbers, bits whatever the delays, errors instead of hangs."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import re
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.loopback import start
from tests.on_ranks import on_ranks
from tests.ops import test_exchanges as exchanges
from tests.ops import test_vocab_behaviour as vocab
from tests.ops.parallel_behaviour import block, meet, message_of, mlp, operands_of, with_gradients
from tests.ops.parallel_cases import Setting, assert_within, equal, leaf, prepare, run_all
from tests.ops.test_collectives import collectives
from tests.ops.test_parallel_citizens import model_unlike_compiled
from tests.ops.transport_cases import be_impatient, open_exchanges, open_stand_in, pushers, under, using
from tests.patience import patient
from tests.products import combined, once
from tests.ranks import COLLECTIVE_SECONDS, FORKED, RankFailure, RankPool
from tpkernels import Recipe
from tpkernels.comm.calls import Call
from tpkernels.comm.transports import c10d, processes
from tpkernels.comm.transports import select as transports
from tpkernels.comm.transports.host import HostExchange
from tpkernels.comm.transports.mailbox import Opening
from tpkernels.comm.transports.memory import Layout
from tpkernels.comm.transports.order import CallOrder
from tpkernels.comm.transports.rows import Gather, Terms
from tpkernels.dispatch import backends
from tpkernels.kernels import dgrad, linear, scaled_linear
from tpkernels.ops.tensor_parallel import mappings
from tpkernels.ops.tensor_parallel.column_linear import column_linear
from tpkernels.ops.tensor_parallel.flag_waits import FLAG_KERNELS
from tpkernels.ops.tensor_parallel.parallel import split_of
from tpkernels.ops.tensor_parallel.row_linear import row_linear

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="these kernels run in the interpreter")

WAYS = {
    "c10d": ("c10d", "torch"),
    "shared torch": ("shared", "torch"),
    "shared triton": ("shared", "triton"),
    "stand-in": ("stand-in", "triton"),
    "rounds": ("rounds", "triton"),
}
PLACES = {
    "2 shared torch": ("ranks2", "shared", "torch"),
    "2 shared triton": ("ranks2", "shared", "triton"),
    "2 stand-in": ("ranks2", "stand-in", "triton"),
    "2 rounds": ("ranks2", "rounds", "triton"),
    "4 rounds": ("ranks4", "rounds", "triton"),
    "4 shared torch": ("ranks4", "shared", "torch"),
    "4 shared triton": ("ranks4", "shared", "triton"),
    "4 shared apart": ("ranks4", "shared apart", "torch"),
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


SENDING = {"c10d": (Call, "announce"), "chunks": (Call, "send"), "shared": (HostExchange, "put")}


@pytest.mark.parametrize(
    ("world", "transport", "backend", "sequence_parallel", "rounds"),
    [
        ("ranks2", "c10d", "torch", False, 2),
        ("ranks4", "c10d", "torch", True, 3),
        ("ranks2", "chunks", "torch", True, 2),
        ("ranks4", "chunks", "torch", False, 2),
        ("ranks2", "shared", "triton", True, 1),
        ("ranks2", "shared", "triton", False, 1),
        ("ranks4", "shared", "torch", True, 3),
        pytest.param("ranks4", "shared", "triton", True, 2, marks=pytest.mark.sweep),
    ],
)
@on_ranks()
def test_delays_change_no_bit(transport, backend, sequence_parallel, rounds):
    """Calls with fresh data and other delays give the bits of calls without delays."""
    prepare(Setting(small_pieces=transport != "c10d"))
    owner, name = SENDING[transport]
    original = getattr(owner, name)
    with using(transport, backend):
        for seed in range(rounds):
            operands = operands_of(seed)
            if not sequence_parallel:
                operands[0] = torch.ones(8, 24) * torch.arange(8.0)[:, None].sin()
            calm = with_gradients(block, operands, sequence_parallel=sequence_parallel)
            delays = random.Random(100 * seed + dist.get_rank())

            def late(self: Any, *arguments: Any, delays: random.Random = delays, **by_peer: Any) -> Any:
                time.sleep(delays.choice([0.0, 0.002, 0.01]))
                return original(self, *arguments, **by_peer)

            with patch.object(owner, name, late):
                assert equal(calm, with_gradients(block, operands, sequence_parallel=sequence_parallel))


# as fp32: minus zero, a subnormal number, infinity, a NaN that signals and two that do not, and what rounds
AWKWARD = [-(2**31), 1, 0x7F80_0000, 0x7F80_0001, -1, 0x7FFF_FFFF, 2**24 + 1, -(2**24) - 1]


OF_WORDS = PLACES | {"2 c10d": ("ranks2", "c10d", "torch"), "2 c10d triton": ("ranks2", "c10d", "triton")}
IN_SWEEP = ("4 shared triton",)  # four ranks spin on two cores for what two show


@pytest.mark.parametrize(
    "place", [pytest.param(name, marks=pytest.mark.sweep if name in IN_SWEEP else ()) for name in OF_WORDS]
)
def test_rows_in_fp8_travel_as_words_bit_for_bit(request, place):
    world, *how = OF_WORDS[place]
    request.getfixturevalue(world).run(under, *how, words_arrive)


def words_arrive() -> None:
    """In chunks or all at once, and of two calls that are awaited in two ways. They have no sum.

    Where the host waits, chunks are read where they land; a copy is made if they are kept.
    """
    prepare(Setting())
    rank, rows, cols, group = dist.get_rank(), 8, 20, dist.group.WORLD  # as of 64 features and scales
    words = torch.arange(-(2**31), 2**31, 2**32 // (dist.get_world_size() * rows * cols))
    words = words[: dist.get_world_size() * rows * cols].to(torch.int32).view(-1, rows, cols)
    words[:, 0, : len(AWKWARD)] = torch.tensor(AWKWARD, dtype=torch.int32)
    for overlap, keep in ((False, True), (True, True), (True, False), (True, True)):  # slots are used in turn
        start_words = partial(split_of("op", group, True, overlap).gather, "op", "words", words[rank], 64)
        gathering = start_words(keeps=keep)
        in_slots = overlap and not gathering.lasts and not gathering.delivery
        landed, waits = gathering.full.untyped_storage().data_ptr(), gathering.delivery is not None
        found, chunks = torch.zeros_like(words).flatten(0, 1), 0
        for where, chunk in gathering:
            found[where] = chunk
            chunks += 1
            if in_slots:
                assert (chunk.untyped_storage().data_ptr() == landed) is not keep
        for gathered in (found, start_words().all(), *([gathering.all()] if keep else [])):
            assert gathered.equal(words.flatten(0, 1))
        assert (chunks > 1) is (overlap and not waits)
    if backends.backend == "triton" and transports.requested_transport != "c10d":
        total = words.flatten(0, 1)
        expected = "kernels that wait take bfloat16, float16 and float32, got torch.int32"
        with pytest.raises((TypeError, ValueError), match=expected):
            split_of("op", group, True).reduce("op", Terms(*total.shape, total, total.__getitem__)).wait()


@pytest.mark.parametrize("transport", ["c10d", "chunks", "shared"])
@on_ranks(2)
def test_rows_with_lazy_negation_travel_as_numbers(transport):
    rows, w, group = torch._neg_view(torch.ones(4, 24)), torch.eye(24), dist.group.WORLD
    with using(transport):
        assert column_linear(rows, w, None, group, sequence_parallel=True).eq(-1).all()
        assert mappings.gather_from_region(rows, group).eq(-1).all()
        for move in (mappings.reduce_scatter_to_sequence_region, mappings.reduce_from_region):
            assert move(rows, group).eq(-2).all()


@pytest.mark.parametrize("world", ["ranks2", "ranks4"])
@on_ranks()
def test_many_calls_of_other_shapes_may_be_in_flight():
    """Rows that just go with a header, one more, and none; awaited in order, and the other way round."""
    group = dist.group.WORLD
    tp, ranks, rank = split_of("op", group, True), group.size(), group.rank()
    most, moving = tp.calls.eager_bytes // 64, list[tuple[Any, Tensor]]()  # rows of 16 numbers
    with using("c10d"), patch.object(Call, "send", autospec=True, side_effect=Call.send) as spy:
        for order, rows in product((1, -1), (1, most, most + 1, 0, 3, most, most + 1, 2)):
            full = torch.arange(ranks * rows * 16.0).view(-1, 16) + rows
            ours = full[rank * rows : (rank + 1) * rows]
            spy.reset_mock()
            moving.append((tp.gather("op", "x", ours), full))
            moving.append((tp.reduce("op", Terms(*full.shape, full, full.__getitem__)), ours * ranks))
            assert (spy.call_count > 0) is (rows > most)
            if rows == 2:
                for each, expected in moving[::order]:
                    assert (each.all() if isinstance(each, Gather) else each.wait()).equal(expected)
                moving.clear()


@on_ranks(2)
def test_one_kernel_multiplies_while_rows_arrive():
    """Forward of column and backward of row: a launch each, and none without overlap."""
    prepare(Setting())
    for overlap, launches in ((True, 1), (False, 0)):
        with (
            using("shared", "triton"),
            patch.object(linear, "linear_fwd", wraps=linear.linear_fwd) as forward,
            patch.object(dgrad, "dgrad", wraps=dgrad.dgrad) as backward,
        ):
            with_gradients(block, operands_of(2), sequence_parallel=True, overlap=overlap)
        assert [waited(forward), waited(backward)] == [launches] * 2


def waited(spy: Mock) -> int:
    """How many calls of a product have waited for rows."""
    return sum("arrivals" in call.kwargs for call in spy.mock_calls)


@pytest.mark.parametrize(
    "recipe", [Recipe.rowwise(gradients="e5m2"), Recipe.blockwise()], ids=["rows", "blocks"]
)
@on_ranks(2)
def test_one_kernel_multiplies_words_while_they_arrive(recipe):
    """Data and scales of each row. The bits are those of a product after the gather."""
    prepare(Setting())
    found = []
    for overlap, launches in ((True, 4), (False, 0)):
        kernel = scaled_linear.scaled_linear_fwd
        with (
            using("shared", "triton"),
            patch.object(scaled_linear, kernel.__name__, wraps=kernel) as spy,
        ):
            options = {"sequence_parallel": True, "overlap": overlap, "quantize": recipe}
            found.append(with_gradients(block, operands_of(2), **options))
            with torch.no_grad():
                x, w, _ = operands_of(2)
                found[-1] += column_linear(x, [w, w[:4]], None, dist.group.WORLD, **options)
        assert waited(spy) == launches
    assert equal(*found)


@on_ranks(2)
def test_all_exchanges_of_an_all_reduce_are_ready_for_a_capture():
    """They have the kernels that count calls."""
    prepare(Setting())
    with using("stand-in", "triton"):
        with_gradients(block, operands_of(4), sequence_parallel=False)
        ready = [exchange.flag_kernels is not None for exchange in open_exchanges()]
    assert len(ready) >= 2
    assert all(ready)


@on_ranks(2)
def test_exchanges_of_a_group_push_in_the_same_streams():
    """torch has 32, which it gives out again: pushes of two exchanges of one group would wait for others'."""
    prepare(Setting())
    with using("stand-in", "triton"):
        with_gradients(block, operands_of(4), sequence_parallel=True)
        found = [exchange.side for exchange in open_exchanges()]
    assert len(found) >= 2
    assert len({*map(id, found)}) == 1


RECIPES = (None, Recipe.rowwise(), Recipe.blockwise())


EACH_WAY = [  # what kernels wait for shows over the stand-in
    pytest.param(way, id=name, marks=pytest.mark.sweep if name == "shared triton" else ())
    for name, way in WAYS.items()
]


@combined
@pytest.mark.parametrize("way", EACH_WAY)
@on_ranks(2)
def test_layers_interleave_and_can_be_checkpointed(way, combined):
    """Two blocks whose forwards and backwards alternate; and recomputed ones, to the bit."""
    prepare(Setting())
    with using(*way):
        alone = [with_gradients(block, operands_of(seed), sequence_parallel=True) for seed in (1, 2)]
        leaves = [[leaf(t) for t in operands_of(seed)] for seed in (1, 2)]
        ys = [block(*operands, sequence_parallel=True) for operands in leaves]
        torch.autograd.backward([y.square().sum() for y in ys])
        for y, operands, expected in zip(ys, leaves, alone, strict=True):
            assert equal([y.detach(), *(t.grad for t in operands)], expected)
        every = combined((block, mlp), RECIPES, (False, True))
        for model, recipe, reentrant in every if way[0] == "c10d" else [(mlp, None, True)]:
            plain = partial(model, sequence_parallel=True, quantize=recipe)
            recomputed = partial(checkpoint, plain, use_reentrant=reentrant)
            assert equal(*(with_gradients(call, operands_of(3)) for call in (plain, recomputed))), recipe


@combined
@pytest.mark.parametrize("transport", ["chunks", "shared"])
@on_ranks(2)
def test_compiled_and_inferred_and_shared_gathers_give_the_same_bits(transport, combined):
    """And without gradients. A list of weights gives what single calls give, by the transfers of one."""
    prepare(Setting())
    x, w, _ = operands_of(5)
    weights, counts = [w, w[:4] * 2, w[:2] * 3], []

    def column(x: Tensor, *weights: Tensor) -> Tensor:
        return torch.cat(column_linear(x, list(weights), None, dist.group.WORLD, sequence_parallel=True), 1)

    def one_by_one(x: Tensor, *weights: Tensor) -> Tensor:
        return torch.cat([column(x, w) for w in weights], 1)

    with using(transport):
        if transport == "shared":  # over c10d in tests/ops/test_parallel_citizens.py
            assert model_unlike_compiled(block, sequence_parallel=True) == []
        for model, recipe, tokens_split in combined((block, mlp), RECIPES, (True, False)):
            call = partial(model, sequence_parallel=tokens_split, quantize=recipe)
            with torch.inference_mode():  # first: what it allocates must serve training too
                inferred = call(*operands_of(4))
            expected = with_gradients(call, operands_of(4))[0]
            with torch.no_grad():
                found = call(*operands_of(4))
            assert equal([found, inferred], [expected, expected]), f"{recipe}, {tokens_split=}"
        column(x, *weights)  # before transfers are counted: ranks agree on the transport
        owner, name = SENDING[transport]
        for several in (weights, weights[:1]):
            spied = patch.object(owner, name, autospec=True, side_effect=getattr(owner, name))
            with torch.no_grad(), spied as spy:
                column(x, *several)
            counts.append(spy.call_count)
        together, apart = (with_gradients(function, [x, *weights]) for function in (column, one_by_one))
    assert counts[0] == counts[1] > 0
    torch.testing.assert_close(together, apart, rtol=1e-5, atol=1e-5)


def replayed_calls(with_barrier: bool) -> list[bool]:
    """Whether calls are exact that use one and the same buffer each time, as a replayed graph does."""
    rank, ranks, rows = dist.get_rank(), dist.get_world_size(), 12
    group = dist.group.WORLD
    layout = Layout(ranks, (rows, exchanges.K), torch.float32, 2)
    exchange = open_stand_in(Opening("replay", group, layout, timeout=60.0))
    exchange.flag_kernels = FLAG_KERNELS  # which count in the interpreter here
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
    with pytest.raises(RankFailure, match=r"product on rank \d: chunk \d had not arrived"):
        ranks2.run(replayed_calls, False)  # the fault shows: flags are of another call


@on_ranks(2)
def test_who_cannot_wait_says_so_before_anything_is_sent():
    """Call after call, where torch cannot wait for a GPU, and where kernels do not take the dtype."""
    for transport, backend, dtype, words in (
        ("stand-in", "torch", torch.float32, "BACKEND=torch computes with torch, which cannot wait"),
        ("shared", "triton", torch.float64, "kernels that wait take bfloat16, float16 and float32"),
    ):
        x, w = torch.randn(2, 8, dtype=dtype), torch.randn(4, 8, dtype=dtype)
        with using(transport, backend):
            group = dist.new_group()
            for _ in range(3):
                with pytest.raises((ValueError, TypeError, RuntimeError), match=words):
                    column_linear(x, w, None, group, sequence_parallel=True)


@on_ranks(1)
def test_a_rank_alone_opens_and_sends_nothing():
    """Where nothing may be opened, sent or agreed on."""
    forbidden = AssertionError("a rank alone has nobody to talk to")
    found = []
    with (
        patch.object(transports, "agree", side_effect=forbidden),
        patch.object(Call, "__init__", side_effect=forbidden),
        patch.object(c10d, "start_all_gather", side_effect=forbidden),
    ):
        for transport, split, recipe in product(("auto", "shared"), (True, False), (None, Recipe.rowwise())):
            with using(transport):
                for model in (block, mlp):
                    found += with_gradients(model, operands_of(1), sequence_parallel=split, quantize=recipe)
        table, weight, *ids = vocab.operands()
        found += with_gradients(lambda *t: vocab.model(*t, *ids, sequence_parallel=True), [table, weight])
    assert all(t.isfinite().all() for t in found)


@on_ranks(2)
def test_rows_that_do_not_divide_make_fewer_parts_or_go_over_c10d():
    prepare(Setting())  # parts of 64 bytes, four at most
    w, group = torch.randn(8, 12), dist.group.WORLD
    with using("shared"):
        for rows in (14, 12, 10, 16):
            row_linear(torch.randn(rows, 12), w, None, group, sequence_parallel=True)
        parts = [(exchange.shape[0], exchange.splits) for exchange in open_exchanges()]
        assert parts == [(7, 1), (6, 3), (5, 1), (8, 4)]
        for rows in (3, 0):
            row_linear(torch.randn(rows, 12), w, None, group)
        column_linear(torch.randn(0, 12), w, None, group, sequence_parallel=True)
        assert len(open_exchanges()) == len(parts)


def _mappings() -> int:
    maps = Path("/proc/self/maps").read_text().splitlines()
    return sum("memfd:tpkernels the " in line for line in maps)  # but those of pages of calls


@pytest.mark.parametrize(("captured", "sizes"), [(False, (1, 2, 3, 1, 4, 5)), (True, (1, 2, 3, 4, 5))])
@on_ranks(2)
def test_few_exchanges_stay_open_but_those_used_last_or_written_by_a_graph(captured, sizes):
    with using("shared"), patch.object(transports, "MOST_OPEN", 3):
        for rows in sizes:
            x, w = torch.randn(rows, 8), torch.randn(4, 8)
            column_linear(x, w, None, dist.group.WORLD, sequence_parallel=True)
            open_exchanges()[0].captured = captured
        gc.collect()
        assert [exchange.shape[0] for exchange in open_exchanges()] == [1, 4, 5]
        assert (pushers(), _mappings()) == (1, 3 * 2)  # one thread a group


@on_ranks(2)
def test_exchanges_end_with_their_group_whose_time_out_is_theirs():
    """One that was destroyed and is held opens nothing."""
    group = dist.new_group(timeout=timedelta(seconds=40))
    x, w = torch.randn(2, 8), torch.randn(4, 8)
    with using("shared"):
        column_linear(x, w, None, group, sequence_parallel=True)
        assert {exchange.timeout for exchange in transports._of_group[id(group)]._open.values()} == {40.0}
        assert (pushers(), _mappings()) == (1, 2)
        dist.barrier()
        dist.destroy_process_group(group)
        with pytest.raises(RuntimeError, match="was destroyed; make a new one"):
            column_linear(x, w, None, group, sequence_parallel=True)
        del group
        gc.collect()
        assert (pushers(), _mappings()) == (0, 0)


REFUSED = {  # the wish of each rank; what is said
    "misspelt on one rank": (
        ["share", "shared"],
        ["on rank 0: TPKERNELS_TRANSPORT is 'share'; expected one of auto, c10d"],
    ),
    "other wishes": (
        ["auto", "shared"],
        ["rank 0 has column_linear with TPKERNELS_TRANSPORT=auto", "rank 1 has column_linear"],
    ),
    "symmetric on the CPU": (
        ["symmetric", "symmetric"],
        [
            "CannotTakePart: column_linear: the gathers of process group '",
            "rank 0 cannot take part: TPKERNELS_TRANSPORT=symmetric exchanges memory of GPUs",
        ],
    ),
    "other shapes": (
        ["shared", "shared"],
        [
            "ValueError: column_linear: the gathers of process group '",
            "expected equal arguments on all ranks, got pieces of (",
        ],
    ),
}


@pytest.mark.parametrize("how", REFUSED)
@on_ranks(2)
def test_what_cannot_be_served_is_an_error_on_every_rank(how):
    wishes, words = REFUSED[how]
    rank = dist.get_rank()
    x, w = torch.randn(4 + 4 * rank * (how == "other shapes"), 8), torch.randn(8, 8)
    with using(wishes[rank]):
        message = message_of(lambda: column_linear(x, w, None, dist.group.WORLD, sequence_parallel=True))
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
                processes.machine = lambda: os._exit(7)
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        started = time.monotonic()
        message = message_of(lambda: block(*operands, sequence_parallel=True))
        raise RuntimeError(f"{time.monotonic() - started:.1f} s: {message}")


LOST = r"column_linear: r(ows of r)?ank 1 (\(chunk \d\) )?(did not arrive|cannot be reached)"


@pytest.mark.parametrize(
    ("transport", "backend", "way", "words"),
    [
        ("shared", "torch", "later", LOST),
        pytest.param("shared", "triton", "later", LOST, marks=pytest.mark.sweep),
        ("shared", "torch", "killed", LOST),
        ("shared", "torch", "while an exchange opens", "column_linear: r.*rank 1.*process group '"),
        ("c10d", "torch", "later", LOST),
        ("chunks", "torch", "later", LOST),
        ("c10d", "torch", "collectives", "column_linear: r.*rank 1 .*process group '"),
    ],
)
def test_a_dead_rank_is_an_error_that_names_op_and_rank(transport, backend, way, words):
    with RankPool(2) as own, pytest.raises(RankFailure) as failure:
        own.run(peer_dies, transport, backend, way)
    seconds, _, survivor = re.split(r" s: (\w*Error): ", str(failure.value.exceptions[0]), maxsplit=1)
    assert re.match(words, survivor, re.DOTALL), survivor
    if way == "killed":
        assert float(seconds) < COLLECTIVE_SECONDS / 2


LATE = [("c10d", "column_linear"), ("shared torch", "row_linear")]


@pytest.mark.parametrize(  # kernels spin for the second, as they do for a dead rank
    ("way", "op"), [*LATE, pytest.param("shared triton", "column_linear", marks=pytest.mark.sweep)]
)
@on_ranks(2)
def test_a_late_rank_is_an_error_that_names_op_and_rank(op, way):
    """One that comes too late for a second call."""
    x, w, w2 = operands_of(8)
    group = dist.new_group(timeout=timedelta(seconds=patient(3.0)))
    calls: dict[str, Callable[[], object]] = {
        "column_linear": lambda: column_linear(x, w, None, group, sequence_parallel=True),
        "row_linear": lambda: row_linear(torch.randn(16, w2.shape[1]), w2, None, group),
    }
    with using(*WAYS[way]):
        calls[op]()
        dist.barrier()
        started = time.monotonic()
        if dist.get_rank() == 0:
            with pytest.raises(RuntimeError, match=rf"{op}: rows of rank 1 (\(chunk |.*did not arrive)"):
                calls[op]()
            assert 0.3 < time.monotonic() - started < patient(COLLECTIVE_SECONDS)
        meet("the late one waits here, alive")


@on_ranks(2)
def test_an_exchange_with_half_a_call_is_refused():
    """One that an error has left with calls begun and never read."""
    x, w = torch.randn(4, 8), torch.randn(8, 8)
    with using("shared"):
        column_linear(x, w, None, dist.group.WORLD, sequence_parallel=True)
        (exchange,) = open_exchanges()
        for _ in range(2):
            start(exchange, [x] * exchange.ranks)
        with pytest.raises(RuntimeError, match=r"has an error ended it\? Then destroy the process group"):
            column_linear(x, w, None, dist.group.WORLD, sequence_parallel=True)


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
