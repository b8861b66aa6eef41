"""The kernels that wait, fed by other ranks: processes that share memory, and virtual ranks of one."""

import gc
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.kernels.checks import raise_if_late
from tests.loopback import open_loopback, open_symmetric_loopback, start
from tests.on_ranks import on_ranks
from tests.patience import patient
from tests.products import once
from tests.ranks import RankFailure, RankPool
from tpkernels.comm.transports.host import HostDelivery, HostExchange
from tpkernels.comm.transports.mailbox import MailboxDelivery, MailboxExchange, Opening
from tpkernels.comm.transports.memory import Layout
from tpkernels.comm.transports.shared import open_shared
from tpkernels.kernels.gather_linear import gather_linear_fwd
from tpkernels.kernels.linear import linear_fwd
from tpkernels.kernels.tiles import MatmulTile
from tpkernels.kernels.waits import Arrivals
from tpkernels.ops.tensor_parallel.flag_waits import KERNEL_WAITS

K, N = 24, 40
TILE = MatmulTile(16, 32, 32, num_warps=4, num_stages=1, group=2)
CALLS = 4  # each slot is written twice
FAULTS = ("flag_without_rows", "skipped_flag", "swapped_rank", "stale_slot")


def shard_of(rank: int, call: int, rows: int) -> Tensor:
    """What a rank brings to a call; every rank can tell what the others bring."""
    return torch.randn(rows, K, generator=torch.Generator().manual_seed(1000 * call + rank))


def weight_of(rank: int) -> Tensor:
    return torch.randn(N, K, generator=torch.Generator().manual_seed(77 + rank))


def arrivals_of(delivery: MailboxDelivery, spin_limit: int | None = None) -> Arrivals:
    return Arrivals(delivery.flags, delivery.awaited, delivery.exchange.status, spin_limit)


def opened(
    rows: int, splits: int = 1, timeout: float = 10.0, dtype: torch.dtype = torch.float32
) -> HostExchange:
    layout = Layout(dist.get_world_size(), (rows, K), dtype, splits)
    return open_shared(Opening("gather", dist.group.WORLD, layout, timeout=timeout))


class Faulty(HostExchange):
    """Pushes wrongly to other ranks, in one way."""

    fault = ""

    def put(self, peer: int, there: slice, rows: Tensor, delivery: HostDelivery) -> None:
        if peer == self.rank or delivery.number < 3:  # the first calls are sound
            super().put(peer, there, rows, delivery)
            return
        landing, chunks = self.landing(delivery.slot, peer), self.chunks_of_ours(there)
        flags = landing.flags[chunks.start : chunks.stop]
        if self.fault == "flag_without_rows":
            flags.fill_(delivery.flag)
        elif self.fault == "skipped_flag":
            landing.rows_of(chunks).copy_(rows)
        elif self.fault == "stale_slot":  # writes the other buffer
            self.landing(1 - delivery.slot, peer).rows_of(chunks).copy_(rows)
            flags.fill_(delivery.flag)
        else:
            shift = (peer - self.rank) * self.shape[0]  # as if it came from the receiver
            memory = self.mailbox(peer).buffers[delivery.slot]
            memory[there.start + shift : there.stop + shift] = rows
            flags.fill_(delivery.flag)


def gather_calls(
    exchange: MailboxExchange, delays: Sequence[float], spin_limit: int | None = None, calls: int = CALLS
) -> list[Tensor]:
    """`calls` gathered products on the same buffers, with fresh data, each after a delay of this rank."""
    results = []
    for call in range(calls):
        time.sleep(delays[call % len(delays)])
        shard = shard_of(exchange.rank, call, exchange.shape[0])
        results.append(gathered_product(start(exchange, [shard] * exchange.ranks), spin_limit))
    return results


def gathered_product(delivery: MailboxDelivery, spin_limit: int | None = None) -> Tensor:
    """The product with this rank's weight, computed while the delivery arrives."""
    rank, arrivals = delivery.exchange.rank, arrivals_of(delivery, spin_limit)
    y = gather_linear_fwd(
        delivery.slots.flatten(0, 1),
        weight_of(rank),
        arrivals=arrivals,
        first_row=rank * delivery.slots.shape[1],
        tile=TILE,
    ).y
    raise_if_late(arrivals, rank)
    delivery.release()
    delivery.wait()
    return y


def gathered_exactly(rank: int, ranks: int, rows: int, results: Sequence[Tensor]) -> list[bool]:
    """Whether each call's result has the bits of `linear` on the whole x."""
    return [
        torch.equal(
            y,
            linear_fwd(
                torch.cat([shard_of(source, call, rows) for source in range(ranks)]),
                weight_of(rank),
                tile=TILE,
            ).y,
        )
        for call, y in enumerate(results)
    ]


def on_shared(
    rows: int, splits: int, delays: Sequence[float], fault: str = "", calls: int = CALLS
) -> list[bool]:
    """On a rank: whether each gathered product, waiting for other processes, is exact."""
    exchange = opened(rows, splits)
    if fault:
        exchange.__class__, exchange.fault = Faulty, fault  # type: ignore[attr-defined]
    try:
        patience = 2_000 if fault == "skipped_flag" else None
        results = gather_calls(exchange, delays, patience, calls)
    finally:
        exchange.close()
    return gathered_exactly(dist.get_rank(), dist.get_world_size(), rows, results)


def killed_peer() -> None:
    """An error on rank 0, since rank 1 is killed after a first call."""
    exchange = opened(12, splits=2, timeout=patient(1.0))
    try:
        gather_calls(exchange, [0.0], calls=1)
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        gather_calls(exchange, [0.0], spin_limit=1_000, calls=1)
    finally:
        exchange.close()


@on_ranks(2)
def test_a_rank_that_does_not_read_is_an_error_that_names_it():
    exchange = opened(4, timeout=0.5)

    def call_often() -> None:
        for call in range(3):
            delivery = start(exchange, [shard_of(0, call, 4)] * exchange.ranks)
            delivery.release()
        delivery.wait()

    if dist.get_rank() == 0:
        words = "gather on rank 0: call 3 may begin once rank 1 has read call 1, which has read 0.*"
        with pytest.raises(RuntimeError, match=f"{words}: the host waited 0.5 s$"):
            call_often()
    dist.barrier()
    exchange.close()


def leftovers(function: Callable[[], object]) -> list[str]:
    """Names in /dev/shm that a call leaves behind, but those that other programs of the machine may make."""
    before = set(os.listdir("/dev/shm"))
    function()
    made = set(os.listdir("/dev/shm")) - before
    return sorted(name for name in made if not name.startswith(("sem.", "torch_", "psm_")))


@on_ranks(2)
def test_shared_memory_goes_with_its_users():
    """Nothing in /dev/shm while it is open, and no mapping and no descriptor after."""
    dist.barrier()
    descriptors = len(os.listdir("/proc/self/fd"))

    def use() -> None:
        exchange = opened(4)
        gather_calls(exchange, [0.0], calls=2)
        exchange.close()

    assert leftovers(use) == []
    gc.collect()  # the interpreter keeps its last arguments in a cycle
    assert "memfd:tpkernels" not in Path("/proc/self/maps").read_text()
    assert len(os.listdir("/proc/self/fd")) <= descriptors


pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="these kernels run in the interpreter")


def delays_of(ranks: int, seed: int) -> list[list[float]]:
    """Of each rank before each call."""
    numbers = random.Random(seed)
    return [[numbers.choice([0.0, 0.01, 0.08]) for _ in range(CALLS)] for _ in range(ranks)]


@pytest.mark.parametrize(
    ("world", "rows", "splits"), [("ranks2", 20, 1), ("ranks2", 20, 2), ("ranks4", 12, 2)]
)
def test_gathers_have_the_bits_of_linear_whatever_the_delays(ranks, rows, splits):
    args = [(rows, splits, delays) for delays in delays_of(ranks.world_size, rows + splits)]
    assert ranks.run_each(on_shared, args) == [[True] * CALLS] * ranks.world_size  # 20 rows, in tiles of 16


@pytest.mark.parametrize("calls", [12, pytest.param(100, marks=pytest.mark.sweep)])
def test_gathers_back_to_back(calls, ranks2: RankPool):
    assert ranks2.run(on_shared, 1, 1, [0.0], "", calls) == [[True] * calls] * 2


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_show(fault, ranks2: RankPool):
    args = [(8, 2, [0.0], fault)] * 2
    if fault == "skipped_flag":
        with pytest.raises(RankFailure, match=r"gather_linear on rank \d: chunk \d had not arrived"):
            ranks2.run_each(on_shared, args)
    else:
        assert all(not all(exact) for exact in ranks2.run_each(on_shared, args))


def test_a_rank_that_dies_leaves_nothing_behind():
    def die() -> None:
        with RankPool(2) as pool, pytest.raises(RankFailure, match=r"rank 1: killed by signal 9"):
            pool.run(killed_peer)

    assert leftovers(die) == []


@once(opened={"host": open_loopback, "symmetric": open_symmetric_loopback}, count=[4, 2, 1])
def test_loopback_gathers_among_virtual_ranks(opened, count):
    ends = opened("gather", Layout(count, (12, K), torch.float32, 2), 20.0)
    results: list[list[torch.Tensor]] = [[] for _ in ends]
    for call in range(CALLS):
        deliveries = [start(end, [shard_of(end.rank, call, 12)] * count) for end in ends]
        for end, delivery in zip(ends, deliveries, strict=True):
            results[end.rank].append(gathered_product(delivery))
    for end, ys in zip(ends, results, strict=True):
        assert gathered_exactly(end.rank, count, 12, ys) == [True] * CALLS
        end.close()


@pytest.mark.parametrize("opened", [open_loopback, open_symmetric_loopback], ids=["host", "symmetric"])
def test_a_call_read_before_the_one_ahead_of_it_does_not_free_that_ones_slots(opened):
    (end,) = opened("gather", Layout(1, (4, K), torch.float32), 20.0)
    first, second = (start(end, [torch.full((4, K), float(call))]) for call in (1, 2))
    second.end()
    with pytest.raises(RuntimeError, match=r"expected call 1 to be released before call 3 begins"):
        start(end, [torch.zeros(4, K)])
    assert first.slots.eq(1).all()
    first.end()
    start(end, [torch.zeros(4, K)]).end()
    end.close()


def test_a_product_of_no_features_waits_for_its_rows_too():
    """Else a rank would push the next call before others have read the one before."""
    first, second = open_loopback("gather", Layout(2, (4, K), torch.float32), 0.1)
    delivery = start(first, [torch.zeros(4, K)] * 2)
    with pytest.raises(RuntimeError, match=r"gather: rows of rank 1 \(chunk 1\) did not arrive"):
        KERNEL_WAITS.product(delivery, torch.zeros(0, K), None, "none", False)
    first.close(), second.close()


def test_an_exchange_refuses_what_cannot_work():
    (end,) = open_loopback("gather", Layout(1, (4, K), torch.float32))
    piece = torch.zeros(4, K)
    with pytest.raises(ValueError, match=r"pieces of shape \(4, 24\) in torch.float32, got \(4, 24\) in"):
        start(end, [piece.half()])
    start(end, [piece]), start(end, [piece])
    with pytest.raises(RuntimeError, match=r"expected call 1 to be released before call 3 begins"):
        start(end, [piece])
    end.close()
    with pytest.raises(RuntimeError, match="closed: open another"):
        start(end, [piece])
    with pytest.raises(ValueError, match="2 chunks divide, got 3"):
        open_loopback("gather", Layout(1, (3, K), torch.float32, 2))
    with pytest.raises(ValueError, match="not empty"):
        open_loopback("gather", Layout(1, (0, K), torch.float32))
