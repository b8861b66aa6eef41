"""Memory with flags between ranks, kernels that wait for it or store into it: processes, virtual ranks."""

import gc
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.checks import open_files
from tests.kernels.checks import raise_if_late
from tests.loopback import open_loopback, open_symmetric_loopback, start
from tests.on_ranks import on_ranks
from tests.ops.parallel_behaviour import message_of
from tests.ops.parallel_cases import Setting, prepare
from tests.ops.transport_cases import open_stand_in, using
from tests.products import once
from tpkernels.comm.calls import Calls, calls_of
from tpkernels.comm.schedule import reduce_plan
from tpkernels.comm.transports import select
from tpkernels.comm.transports.mailbox import MailboxDelivery, MailboxExchange, Opening
from tpkernels.comm.transports.memory import Layout
from tpkernels.comm.transports.order import CallOrder
from tpkernels.comm.transports.rows import Gather
from tpkernels.comm.transports.shared import open_shared
from tpkernels.kernels.linear import linear_fwd
from tpkernels.kernels.reduce import reduce_slots
from tpkernels.kernels.reference import reduce_slots_ref
from tpkernels.kernels.scatter_linear import scatter_linear
from tpkernels.kernels.tiles import MatmulTile
from tpkernels.kernels.waits import Arrivals, Departures
from tpkernels.ops.matmul import PLAIN
from tpkernels.ops.tensor_parallel.flag_waits import FlagKernels
from tpkernels.ops.tensor_parallel.parallel_mlp import parallel_mlp
from tpkernels.ops.tensor_parallel.row_linear import row_linear

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="these kernels run in the interpreter")

K, N = 24, 40
TILE = MatmulTile(16, 32, 32, num_warps=4, num_stages=1, group=2)
CALLS = 4  # each slot is written twice


def matrix(rows: int, cols: int, seed: int) -> Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))


def shard_of(rank: int, call: int, rows: int) -> Tensor:
    """What a rank brings to a call; every rank can tell what the others bring."""
    return matrix(rows, K, 1000 * call + rank)


def weight_of(rank: int) -> Tensor:
    return matrix(N, K, 77 + rank)


def arrivals_of(delivery: MailboxDelivery, spin_limit: int | None = None) -> Arrivals:
    return Arrivals(delivery.flags, delivery.awaited, delivery.exchange.status, spin_limit=spin_limit)


def opened(way: str, shape: tuple[int, int], splits: int = 1, timeout: float = 60.0) -> MailboxExchange:
    layout = Layout(dist.get_world_size(), shape, torch.float32, splits)
    opening = Opening("it", dist.group.WORLD, layout, timeout=timeout)
    return (open_shared if way == "shared" else open_stand_in)(opening)


def gathered_product(delivery: MailboxDelivery, spin_limit: int | None = None) -> Tensor:
    """The product with this rank's weight, computed while the delivery arrives."""
    rank, arrivals = delivery.exchange.rank, arrivals_of(delivery, spin_limit)
    y = linear_fwd(
        delivery.slots.flatten(0, 1),
        weight_of(rank),
        arrivals=arrivals,
        first_row=rank * delivery.slots.shape[1],
        tile=TILE,
    ).y
    raise_if_late(arrivals, rank)
    delivery.end()
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


def delays() -> list[float]:
    """Of this rank before each call."""
    numbers = random.Random(dist.get_rank())
    return [numbers.choice([0.0, 0.0, 0.01, 0.08]) for _ in range(CALLS)]


@pytest.mark.parametrize(("world", "rows"), [("ranks2", 20), ("ranks4", 12)])  # in tiles of 16
@on_ranks()
def test_gathers_have_the_bits_of_linear_whatever_the_delays(rows):
    rank, ranks, results = dist.get_rank(), dist.get_world_size(), []
    exchange = opened("shared", (rows, K), splits=2)
    for call, delay in enumerate(delays()):
        time.sleep(delay)
        results.append(gathered_product(start(exchange, [shard_of(rank, call, rows)] * ranks)))
    exchange.close()
    assert gathered_exactly(rank, ranks, rows, results) == [True] * CALLS


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


def mlp_steps(width: int) -> tuple[list[str], int]:
    """(what exchanges are for that three steps of an MLP open, how many of their calls need a barrier)."""
    group, barriers, begin = dist.new_group(), 0, CallOrder.begin

    def counted(order: CallOrder) -> tuple[int, bool]:
        nonlocal barriers
        number, needs_barrier = begin(order)
        barriers += needs_barrier
        return number, needs_barrier

    x, up, down = (matrix(*sizes, 1).requires_grad_() for sizes in ((8, K), (16, K), (width, 16)))
    with using("shared"), patch.object(CallOrder, "begin", counted):
        for _ in range(3):
            parallel_mlp(x, up, None, down, None, group, sequence_parallel=True).sum().backward()
    return sorted(key[0] for key in select._of_group[id(group)]._open), barriers


@on_ranks(2)
def test_gathers_that_are_in_flight_at_once_make_no_barriers():
    """In the backward of an MLP dy and x have one shape."""
    alike = mlp_steps(K)
    assert alike == (["gathers", "gathers of x", "reduces"], 0), alike
    unlike = mlp_steps(K + 8)
    assert unlike == (["gathers", "gathers", "reduces", "reduces"], 0), unlike


def factors(rank: int, call: int, rows: int) -> tuple[Tensor, Tensor]:
    return matrix(rows, 8, 1000 * call + rank), matrix(16, 8, 77 + 1000 * call + rank)


def expected_sum(rank: int, ranks: int, call: int, rows: int) -> Tensor:
    partials = [linear_fwd(*factors(source, call, ranks * rows), tile=TILE).y for source in range(ranks)]
    return reduce_slots_ref(torch.stack([partial[rank * rows : (rank + 1) * rows] for partial in partials]))


def sum_of_stored(exchange: MailboxExchange, call: int) -> Tensor:
    """What the kernels of all ranks have stored into our slots: each stores into the memory of all."""
    (rows, cols), ranks, rank = exchange.shape, exchange.ranks, exchange.rank
    plan = reduce_plan(ranks * rows, ranks, rank, exchange.splits, False)
    delivery = exchange.begin(None, plan, cols, torch.empty(0))
    delivery.before_kernels_push()
    scatter_linear(
        (factors(rank, call, ranks * rows),),
        departures=Departures(*delivery.departures()),
        ranks=ranks,
        rank=rank,
        splits=exchange.splits,
        tile=TILE,
    )
    delivery.before_kernels_wait()
    total = reduce_slots(delivery.slots, arrivals=arrivals_of(delivery))
    assert not exchange.late()
    delivery.end()
    return total


@pytest.mark.parametrize(
    ("world", "way", "first"),
    [
        ("ranks2", "shared", 0),
        ("ranks2", "stand-in", 0),
        ("ranks4", "shared", 0),
        ("ranks2", "shared", 2**31 - 4),  # numbers of calls pass what flags can hold
        ("ranks2", "stand-in", 2**31 - 4),
    ],
)
@on_ranks()
def test_sums_of_what_kernels_store_have_the_bits_of_the_oracle_whatever_the_delays(way, first):
    """first: the number of the call before the first"""
    rank, ranks, rows = dist.get_rank(), dist.get_world_size(), 4
    exchange = opened(way, (rows, 16), splits=2)
    exchange.order.begun = exchange.order.read = first
    exchange.mailbox(rank).released.fill_(first % 2**31)
    dist.barrier()
    totals = []
    for call, delay in enumerate(delays()):
        time.sleep(delay)
        totals.append(sum_of_stored(exchange, call))
    dist.barrier()
    exchange.close()
    for call, total in enumerate(totals):
        assert total.equal(expected_sum(rank, ranks, call, rows)), f"call {call}"


@on_ranks(2)
def test_ranks_say_whether_a_kernel_pushes_and_refuse_those_that_do_not_as_they_do():
    """Without overlap none does. Refused where calls bear no tags, as with NCCL."""
    prepare(Setting())
    group, (x, weight) = dist.new_group(), factors(0, 0, 8)
    untagged = patch.object(Calls, "has_tags", lambda self, device: False)
    by_copies = patch.object(FlagKernels, "pushes", lambda *_: False)
    with using("stand-in", "triton"):
        for overlap in (True, False):
            row_linear(x, weight, None, group, sequence_parallel=True, overlap=overlap)
        assert [kind.described for kind in calls_of(group).kinds.values() if kind.transport] == [
            "row_linear: shards of the sum by a kernel (8, 16) torch.float32",
            "row_linear: shards of the sum (8, 16) torch.float32",
        ]
        with untagged, by_copies if dist.get_rank() else nullcontext():
            group = dist.new_group()
            message = message_of(lambda: row_linear(x, weight, None, group, sequence_parallel=True))
    assert "ranks disagree: rank 0 has row_linear: shards of the sum by a kernel (" in message, message
    assert "; rank 1 has row_linear: shards of the sum (" in message


@on_ranks(2)
def test_a_rank_that_does_not_read_is_an_error_that_names_it():
    """Before the host pushes, and before a kernel does."""
    exchange, stored_to = (opened("shared", (4, K), timeout=0.5) for _ in range(2))
    plan = reduce_plan(4 * exchange.ranks, exchange.ranks, exchange.rank, 1, False)

    def call_often() -> None:
        for call in range(3):
            delivery = start(exchange, [shard_of(0, call, 4)] * exchange.ranks)
            delivery.end()

    def store_often() -> None:
        for _ in range(3):
            delivery = stored_to.begin(None, plan, K, torch.empty(0))
            delivery.before_kernels_push()
            delivery.end()

    if dist.get_rank() == 0:
        words = "it on rank 0: call 3 may begin once rank 1 has read call 1, which has read 0.*"
        for often in (call_often, store_often):
            with pytest.raises(RuntimeError, match=f"{words}: the host waited 0.5 s$"):
                often()
    dist.barrier()
    exchange.close(), stored_to.close()


def leftovers(function: Callable[[], object]) -> list[str]:
    """Names in /dev/shm that a call leaves behind, but those that other programs of the machine may make."""
    before = set(os.listdir("/dev/shm"))
    function()
    made = set(os.listdir("/dev/shm")) - before
    return sorted(name for name in made if not name.startswith(("sem.", "torch_", "psm_")))


@on_ranks(2)
def test_shared_memory_goes_with_its_users():
    """Nothing in /dev/shm while it is open, and no mapping and no descriptor after."""

    def held() -> tuple[int, Counter[str]]:
        gc.collect()  # the interpreter keeps its last arguments in a cycle
        return Path("/proc/self/maps").read_text().count("memfd:tpkernels"), open_files()

    def use() -> None:
        exchange = opened("shared", (4, K))
        for call in range(2):
            gathered_product(start(exchange, [shard_of(exchange.rank, call, 4)] * exchange.ranks))
        exchange.close()

    use()  # opens what the group keeps, its pages of calls
    dist.barrier()
    mappings, descriptors = held()  # of groups of other tests, too
    assert leftovers(use) == []
    after = held()
    assert after[0] <= mappings
    assert not after[1] - descriptors


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
    rows = Gather(delivery.memory, delivery=delivery)
    with pytest.raises(RuntimeError, match=r"gather: rows of rank 1 \(chunk 1\) did not arrive"):
        PLAIN.product(rows, [torch.zeros(0, K)], [None], dtype=torch.float32)
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
