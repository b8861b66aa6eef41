"""The kernels that wait, fed by other ranks: processes that share memory, and virtual ranks of one."""

import random

import pytest
import torch

from tests.loopback import open_loopback, open_symmetric_loopback, start
from tests.ops import exchanges
from tests.ops.exchanges import CALLS, FAULTS, K, gathered_exactly, gathered_product, shard_of
from tests.ranks import RankFailure, RankPool
from tpkernels.comm.transports.memory import Layout
from tpkernels.ops.tensor_parallel.flag_waits import KERNEL_WAITS

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="these kernels run in the interpreter")


def delays_of(ranks: int, seed: int) -> list[list[float]]:
    numbers = random.Random(seed)
    return [[numbers.choice([0.0, 0.01, 0.08]) for _ in range(CALLS)] for _ in range(ranks)]


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("seed", [1, 2])
def test_gather_on_two_ranks_has_the_bits_of_linear_whatever_the_delays(seed, splits, ranks2: RankPool):
    args = [(20, splits, delays) for delays in delays_of(2, seed)]  # 20 rows, in tiles of 16
    assert ranks2.run_each(exchanges.on_shared, args) == [[True] * CALLS] * 2


def test_gather_on_four_ranks_has_the_bits_of_linear_whatever_the_delays(ranks4: RankPool):
    args = [(12, 2, delays) for delays in delays_of(4, 3)]
    assert ranks4.run_each(exchanges.on_shared, args) == [[True] * CALLS] * 4


def test_reduce_on_two_ranks_has_the_bits_of_the_oracle_whatever_the_delays(ranks2: RankPool):
    args = [(20, 2, delays) for delays in delays_of(2, 4)]
    assert ranks2.run_each(exchanges.reduces_on_shared, args) == [[True] * CALLS] * 2


def test_reduce_on_four_ranks_has_the_bits_of_the_oracle_whatever_the_delays(ranks4: RankPool):
    args = [(12, 1, delays) for delays in delays_of(4, 5)]
    assert ranks4.run_each(exchanges.reduces_on_shared, args) == [[True] * CALLS] * 4


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_show(fault, ranks2: RankPool):
    args = [(20, 2, [0.0], fault)] * 2
    if fault == "skipped_flag":
        with pytest.raises(RankFailure, match=r"gather_linear on rank \d: chunk \d had not arrived"):
            ranks2.run_each(exchanges.on_shared, args)
    else:
        assert all(not all(exact) for exact in ranks2.run_each(exchanges.on_shared, args))


@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_that_stays_away_is_an_error_that_names_op_rank_and_chunk(absent, ranks2: RankPool):
    answers = ranks2.run(exchanges.absent_rank, 12, absent, "stays")
    message, seconds = answers[1 - absent]
    assert f"gather_linear on rank {1 - absent}: chunk {2 * absent} had not arrived" in message
    assert seconds < 20


def test_a_rank_that_dies_leaves_nothing_behind():
    def die() -> None:
        with RankPool(2) as pool, pytest.raises(RankFailure, match=r"rank 1: killed by signal 9"):
            pool.run(exchanges.absent_rank, 12, 1, "dies")

    assert exchanges.leftovers(die) == []


def test_a_rank_that_does_not_read_is_an_error_that_names_it(ranks2: RankPool):
    message, other = ranks2.run(exchanges.unread_call, 4)
    assert "gather on rank 0: call 3 may begin once rank 1 has read call 1, which has read 0" in message
    assert message.endswith(": the host waited 0.5 s")
    assert other == "nothing"


def test_shared_memory_goes_with_its_users(ranks2: RankPool):
    for left, descriptors in ranks2.run(exchanges.opened_and_dropped):
        assert left == []
        assert descriptors <= 0


def test_an_exchange_that_nobody_closed_leaves_no_thread(ranks2: RankPool):
    assert ranks2.run(exchanges.dropped_open) == [0, 0]


def test_open_shared_refuses_different_arguments_on_every_rank(ranks2: RankPool):
    for message in ranks2.run(exchanges.different_arguments):
        assert "expected equal arguments on all ranks" in message


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("opened", [open_loopback, open_symmetric_loopback], ids=["host", "symmetric"])
def test_loopback_gathers_among_virtual_ranks(opened, ranks):
    ends = opened("gather", Layout(ranks, (12, K), torch.float32, 2), 20.0)
    results: list[list[torch.Tensor]] = [[] for _ in ends]
    for call in range(CALLS):
        deliveries = [start(end, [shard_of(end.rank, call, 12)] * ranks) for end in ends]
        for end, delivery in zip(ends, deliveries, strict=True):
            results[end.rank].append(gathered_product(delivery))
    for end, ys in zip(ends, results, strict=True):
        assert gathered_exactly(end.rank, ranks, 12, ys) == [True] * CALLS
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
