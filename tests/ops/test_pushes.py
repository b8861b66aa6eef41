"""Kernels that store into the slots of other ranks: interpreted, between processes that share memory."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.on_ranks import on_ranks
from tests.ops.parallel_behaviour import message_of
from tests.ops.parallel_cases import Setting, prepare
from tests.ops.test_exchanges import arrivals_of, delays_of
from tests.ops.transport_cases import open_stand_in, using
from tests.patience import patient
from tests.ranks import RankFailure, RankPool
from tpkernels.comm.calls import GroupCalls, calls_of
from tpkernels.comm.schedule import reduce_plan
from tpkernels.comm.transports.mailbox import MailboxDelivery, MailboxExchange, Opening
from tpkernels.comm.transports.memory import Layout
from tpkernels.comm.transports.shared import open_shared
from tpkernels.kernels.linear import linear_fwd
from tpkernels.kernels.reduce import reduce_slots
from tpkernels.kernels.reference import reduce_slots_ref
from tpkernels.kernels.scatter_linear import scatter_linear
from tpkernels.kernels.tiles import MatmulTile
from tpkernels.kernels.waits import Departures, kernel_and_chunk
from tpkernels.ops.tensor_parallel import parallel
from tpkernels.ops.tensor_parallel.row_linear import row_linear

K, N = 8, 16
TILE = MatmulTile(16, 16, 16, num_warps=4, num_stages=1, group=1)
FAULTS = ("early_flag", "swapped_chunks", "wrong_owner")

Push = Callable[[MailboxDelivery, int], None]


def operands(rank: int, call: int, rows: int) -> tuple[Tensor, Tensor]:
    """What a rank multiplies; every rank can tell what the others multiply."""
    generator = torch.Generator().manual_seed(1000 * call + rank)
    return torch.randn(rows, K, generator=generator), torch.randn(N, K, generator=generator)


def kernel_pushes(delivery: MailboxDelivery, call: int) -> None:
    """By the kernel, which an interpreter runs here: it stores into the memory of other processes."""
    exchange = delivery.exchange
    a, weight = operands(exchange.rank, call, exchange.ranks * exchange.shape[0])
    scatter_linear(
        ((a, weight),),
        departures=Departures(*delivery.departures()),
        ranks=exchange.ranks,
        rank=exchange.rank,
        splits=exchange.splits,
        tile=TILE,
    )


def writer_pushes(delivery: MailboxDelivery, call: int) -> None:
    """As the kernel does, by plain stores to the addresses that it would be given."""
    exchange, (slots, flags, counters, awaited) = delivery.exchange, delivery.departures()
    partials = product_of(exchange.rank, call, exchange.ranks * exchange.shape[0])
    shards = partials.view(exchange.ranks, *exchange.shape).contiguous()
    assert counters.shape == (exchange.ranks * exchange.splits,)
    assert not counters.any()
    for step in range(1, exchange.ranks + 1):
        owner = (exchange.rank - step) % exchange.ranks
        ctypes.memmove(int(slots[owner]), shards[owner].data_ptr(), shards[owner].nbytes)
        for chunk in range(exchange.splits):
            ctypes.c_int32.from_address(int(flags[owner]) + 4 * chunk).value = int(awaited)


def copies(delivery: MailboxDelivery, call: int) -> None:
    """By no kernel, but as the host sends rows."""
    exchange = delivery.exchange
    rows = exchange.shape[0]
    partials = product_of(exchange.rank, call, exchange.ranks * rows)
    for swap in delivery.plan.swaps:
        delivery.move([swap], partials[swap.to * rows :][:rows], swap.to * rows)
    delivery.keep(partials[exchange.rank * rows :][:rows])


def product_of(rank: int, call: int, rows: int) -> Tensor:
    return linear_fwd(*operands(rank, call, rows), tile=TILE).y


def expected_sum(rank: int, ranks: int, call: int, rows: int) -> Tensor:
    partials = [product_of(source, call, ranks * rows) for source in range(ranks)]
    return reduce_slots_ref(torch.stack([partial[rank * rows : (rank + 1) * rows] for partial in partials]))


def pushed(exchange: MailboxExchange, call: int, push: Push) -> MailboxDelivery:
    """The next call, in which a kernel stores this rank's rows."""
    rows, cols = exchange.shape
    plan = reduce_plan(exchange.ranks * rows, exchange.ranks, exchange.rank, exchange.splits, False)
    delivery = exchange.begin(None, plan, cols, torch.empty(0))
    if push is not copies:
        delivery.before_kernels_push()
    push(delivery, call)
    return delivery


def summed(delivery: MailboxDelivery, spin_limit: int | None = None) -> Tensor:
    delivery.before_kernels_wait()
    total = reduce_slots(delivery.slots, arrivals=arrivals_of(delivery, spin_limit))
    if word := delivery.exchange.late():
        kernel, chunk = kernel_and_chunk(word)
        raise delivery.late_chunk(chunk, f"a wait of {kernel} ran out")
    delivery.end()
    return total


def opened(way: str, rows: int, splits: int, timeout: float = 20.0) -> MailboxExchange:
    layout = Layout(dist.get_world_size(), (rows, N), torch.float32, splits)
    opening = Opening("it", dist.group.WORLD, layout, timeout=timeout)
    return (open_shared if way == "shared" else open_stand_in)(opening)


def sums(
    way: str, push: Push, rows: int, splits: int, calls: int, delays: Sequence[float], first: int = 0
) -> list[bool]:
    """On a rank: whether each sum of what the ranks' kernels stored has the bits of the oracle.

    first: the number of the call before the first
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    exchange = opened(way, rows, splits)
    exchange.order.begun = exchange.order.read = first
    exchange.mailbox(rank).released.fill_(first % 2**31)
    dist.barrier()
    totals = []
    for call in range(calls):
        time.sleep(delays[call % len(delays)])
        totals.append(summed(pushed(exchange, call % 7, push)))
    dist.barrier()
    exchange.close()
    expected = [expected_sum(rank, ranks, call, rows) for call in range(min(calls, 7))]
    return [torch.equal(total, expected[call % 7]) for call, total in enumerate(totals)]


def faulty_sums(fault: str) -> tuple[list[bool], str]:
    """On a rank: which sums are exact where rank 1's kernel is wrong, and what is said."""
    rank, ranks, rows, splits = dist.get_rank(), dist.get_world_size(), 4, 2
    exchange = opened("shared", rows, splits)

    def push(delivery: MailboxDelivery, call: int) -> None:
        departures = delivery.departures()
        if rank == 0 or call < 2:
            return kernel_pushes(delivery, call)
        if fault == "early_flag":  # as if a chunk were complete before its last tile
            for owner in range(ranks):
                for chunk in range(splits):
                    ctypes.c_int32.from_address(int(departures.flags[owner]) + 4 * chunk).value = int(
                        departures.awaited
                    )
            while int(exchange.mailbox(0).released) < delivery.number:  # until rank 0 has read too early
                time.sleep(0.001)
        elif fault == "swapped_chunks":  # the flag of the other chunk, which is one word further
            departures = departures._replace(flags=departures.flags + 4)
        else:
            departures = departures._replace(slots=departures.slots.flip(0))
        with patch.object(delivery, "departures", lambda: departures):
            return kernel_pushes(delivery, call)

    exact, said = [], ""
    try:
        for call in range(4):
            patience = 1_000 if fault == "swapped_chunks" and call == 2 else None  # to run out
            total = summed(pushed(exchange, call, push), patience)
            exact.append(torch.equal(total, expected_sum(rank, ranks, call, rows)))
    except RuntimeError as error:
        said = str(error)
    dist.barrier()
    exchange.close()
    return exact, said


def killed_peer() -> None:
    """An error on rank 0, since rank 1 is killed after its kernel has stored rows of two more calls."""
    rank, exchange = dist.get_rank(), opened("shared", 4, 2)
    summed(pushed(exchange, 0, kernel_pushes))
    dist.barrier()
    if rank == 1:
        for call in (1, 2):
            pushed(exchange, call, kernel_pushes)
        os.kill(os.getpid(), signal.SIGKILL)
    for call in range(1, 4):
        started = time.monotonic()
        try:
            summed(pushed(exchange, call, kernel_pushes), spin_limit=2_000)
        except RuntimeError as error:
            raise RuntimeError(f"after {time.monotonic() - started:.1f} s in call {call}: {error}") from error


@on_ranks(2)
def test_ranks_say_whether_a_kernel_pushes():
    """Without overlap none does."""
    prepare(Setting())
    group = dist.new_group()
    x, weight = operands(0, 0, 8)
    with using("stand-in", "triton"):
        for overlap in (True, False):
            row_linear(x, weight, None, group, sequence_parallel=True, overlap=overlap)
    assert [text for _, text in calls_of(group)._recent if "of the sum" in text] == [
        "row_linear: shards of the sum by a kernel (8, 16) torch.float32",
        "row_linear: shards of the sum (8, 16) torch.float32",
    ]


@on_ranks(2)
def test_a_rank_that_does_not_push_as_the_others_do_is_refused():
    """Where calls bear no tags, as with NCCL."""
    prepare(Setting())
    group, x, weight = dist.new_group(), *operands(0, 0, 8)
    untagged = patch.object(GroupCalls, "matches_tags", lambda self, device: False)
    by_copies = patch.object(parallel, "kernel_pushes", lambda *_: False)
    with using("stand-in", "triton"), untagged, by_copies if dist.get_rank() else nullcontext():
        message = message_of(lambda: row_linear(x, weight, None, group, sequence_parallel=True))
    assert "ranks disagree: rank 0 has row_linear: shards of the sum by a kernel (" in message
    assert "; rank 1 has row_linear: shards of the sum (" in message


pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="these kernels run in the interpreter")

CALLS = 4


@pytest.mark.parametrize(
    ("world", "way", "push"),
    [
        ("ranks2", "shared", writer_pushes),
        ("ranks2", "shared", kernel_pushes),
        ("ranks2", "shared", copies),
        ("ranks2", "stand-in", writer_pushes),
        ("ranks2", "stand-in", kernel_pushes),
        ("ranks4", "shared", kernel_pushes),
        ("ranks4", "shared", copies),
    ],
)
def test_sums_have_the_bits_of_the_oracle_whatever_the_delays(ranks, way, push):
    args = [(way, push, 4, 2, CALLS, delays) for delays in delays_of(ranks.world_size, 1)]
    assert ranks.run_each(sums, args) == [[True] * CALLS] * ranks.world_size


@pytest.mark.parametrize("way", ["shared", "stand-in"])
def test_numbers_of_calls_may_pass_what_flags_can_hold(way, ranks2: RankPool):
    args = (way, kernel_pushes, 2, 1, 5, [0.0], 2**31 - 4)
    assert ranks2.run(sums, *args) == [[True] * 5] * 2


# enough to use each slot again and again, and all operands; the more, the more ways to interleave
@pytest.mark.parametrize("calls", [12, pytest.param(100, marks=pytest.mark.sweep)])
def test_sums_back_to_back(calls, ranks2: RankPool):
    args = ("shared", kernel_pushes, 1, 1, calls, [0.0])
    assert ranks2.run(sums, *args) == [[True] * calls] * 2


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_show(fault, ranks2: RankPool):
    (exact, said), (_, said_by_culprit) = ranks2.run(faulty_sums, fault)
    assert exact[:2] == [True, True]
    if fault == "swapped_chunks":  # a flag of the first chunk is never raised, the next rank's is
        assert "it: rows of rank 1 (chunk 2) did not arrive: it died, came too late" in said
    else:
        assert (exact[2:], said) == ([False, False], "")
        assert said_by_culprit == ""


def test_a_killed_peer_is_an_error_in_time():
    with RankPool(2) as own, pytest.raises(RankFailure, match="rank 1: killed by signal 9") as failure:
        own.run(killed_peer)
    survivor = str(failure.value.exceptions[0])
    said = "in call 3: it on rank 0: call 4 may begin once rank 1 has read call 2.* its process has ended"
    assert re.match(f"after [0-9.]+ s {said}", survivor), survivor
    assert float(survivor.split()[1]) < patient(10)
