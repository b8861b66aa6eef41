"""Kernels that wait for rows which are pushed to them, on a real GPU: virtual ranks, and processes."""

from __future__ import annotations

import os
import random
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.loopback import open_symmetric_loopback, start
from tests.ops.parallel_behaviour import block, message_of, operands_of, with_gradients
from tests.ops.transport_cases import two_if_hidden
from tests.ranks import RankPool
from tests.stand_in_gpu import RanksOnStandIn, StandIn
from tpkernels.comm.schedule import reduce_plan
from tpkernels.comm.transports import c10d
from tpkernels.comm.transports import select as transports
from tpkernels.comm.transports.mailbox import MailboxDelivery
from tpkernels.comm.transports.memory import Layout
from tpkernels.comm.transports.rows import Gather
from tpkernels.comm.transports.symmetric import SymmetricExchange
from tpkernels.kernels.linear import linear_fwd
from tpkernels.kernels.reference import reduce_slots_ref
from tpkernels.kernels.scatter_linear import scatter_linear
from tpkernels.kernels.waits import CHUNK_BITS, OPS, Departures
from tpkernels.ops.matmul import PLAIN
from tpkernels.ops.tensor_parallel.column_linear import column_linear
from tpkernels.ops.tensor_parallel.flag_waits import FLAG_KERNELS

OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


def blocks_on_one_gpu(sequence_parallel: bool, transport: str) -> float:
    """Forward and backward of two layers, several times, against c10d on the CPU: the largest difference."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    worst = 0.0
    cpu = dist.new_group()
    with patch.dict(os.environ, {OVERLAPPING: "1"}):
        for seed in range(5):
            operands = operands_of(seed)
            expected = with_gradients(block, operands, sequence_parallel=sequence_parallel, group=cpu)
            with (
                patch.object(transports, "requested_transport", transport),
                patch.object(c10d, "collective_rounds", two_if_hidden),
            ):
                found = with_gradients(
                    block, [t.to(device) for t in operands], sequence_parallel=sequence_parallel
                )
            torch.cuda.synchronize()
            pairs = zip(found, expected, strict=True)
            worst = max(worst, *(float((x.cpu() - y).norm() / y.norm()) for x, y in pairs))
        dist.barrier()
    return worst


def gpu_shared_without_asking() -> str:
    """What ranks say that share a GPU, unless torch was told that they may."""
    torch.cuda.set_device(0)
    group = dist.group.WORLD
    assert group is not None
    x, w = torch.randn(4, 16, device="cuda"), torch.randn(8, 16, device="cuda")
    with patch.dict(os.environ), patch.object(transports, "requested_transport", "symmetric"):
        os.environ.pop(OVERLAPPING, None)
        return message_of(lambda: column_linear(x, w, None, group, sequence_parallel=True))


pytestmark = pytest.mark.gpu

RANKS, ROWS, K, N = 4, 256, 512, 768


@pytest.fixture
def ends() -> list[SymmetricExchange]:
    return open_symmetric_loopback("gather", Layout(RANKS, (ROWS, K), torch.bfloat16, 2), 2.0, "cuda")


@pytest.fixture
def processes(ranks2: RankPool, stand_in_gpu: StandIn | None) -> RankPool | RanksOnStandIn:
    return ranks2 if stand_in_gpu is None else RanksOnStandIn(ranks2, stand_in_gpu.name)


def shards(call: int) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(call)
    return [torch.randn(ROWS, K, device="cuda", generator=generator).bfloat16() for _ in range(RANKS)]


def weight() -> Tensor:
    return (
        torch.randn(N, K, device="cuda", generator=torch.Generator("cuda").manual_seed(9)) / 16
    ).bfloat16()


def product(delivery: MailboxDelivery, weight: Tensor) -> Tensor:
    """Of all rows, by a kernel that waits for them."""
    rows = Gather(delivery.memory, delivery=delivery, keeps=False)
    return PLAIN.product(rows, [weight], [None], dtype=weight.dtype)[0]


def total(delivery: MailboxDelivery) -> Tensor:
    return FLAG_KERNELS.sum_of(delivery.slots, None, delivery, tree=False)


def finish(delivery: MailboxDelivery) -> None:
    delivery.end()


def test_virtual_ranks_gather_and_multiply(ends):
    w = weight()
    for call in range(6):
        pieces = shards(call)
        deliveries = [start(end, [pieces[end.rank]] * RANKS) for end in ends]
        expected = linear_fwd(torch.cat(pieces), w).y.float()
        for delivery in deliveries:
            y = product(delivery, w)
            finish(delivery)
            assert (y.float() - expected).norm() < 1e-2 * expected.norm()
    torch.cuda.synchronize()
    assert [end.late() for end in ends] == [0] * RANKS


def test_virtual_ranks_reduce(ends):
    for call in range(6):
        parts = [shards(10 * call + rank) for rank in range(RANKS)]
        deliveries = [start(end, parts[end.rank], reducing=True) for end in ends]
        for rank, delivery in enumerate(deliveries):
            found = total(delivery)
            finish(delivery)
            assert torch.equal(found, reduce_slots_ref(torch.stack([part[rank] for part in parts])))


def test_a_captured_call_can_be_replayed(ends):
    w, pieces = weight(), shards(0)

    def call() -> list[Tensor]:
        deliveries = [start(end, [pieces[end.rank]] * RANKS) for end in ends]
        ys = []
        for delivery in deliveries:
            ys.append(product(delivery, w))
            finish(delivery)
        return ys

    for end in ends:
        end.count_by(FLAG_KERNELS)
    call()  # kernels are loaded before a capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ys = call()
    assert all(end.captured for end in ends)
    for replay in range(5):
        for piece, fresh in zip(pieces, shards(100 + replay), strict=True):
            piece.copy_(fresh)
        graph.replay()
        expected = linear_fwd(torch.cat(pieces), w).y.float()
        for y in ys:
            assert (y.float() - expected).norm() < 1e-2 * expected.norm()
    torch.cuda.synchronize()
    assert [end.late() for end in ends] == [0] * RANKS


def test_rows_that_never_come_are_an_error_of_a_later_call(ends, stand_in_gpu):
    deliveries = [start(end, [shards(0)[0]] * RANKS) for end in ends[:-1]]  # the last rank pushes nothing
    product(deliveries[0], weight())
    if stand_in_gpu is not None:  # what the product leaves on a GPU
        late = (OPS.index("product") + 1 << CHUNK_BITS) + 3 * ends[0].splits
        stand_in_gpu.numbers[ends[0].status.data_ptr()] = late
    ends[0].look()
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match=r"gather: rows of rank 3 \(chunk \d\) did not arrive"):
        product(deliveries[0], weight())


@pytest.mark.parametrize("mode", ["eager", "captured"])
def test_flags_tell_of_their_own_rows_in_1000_delayed_calls(ends, mode, stand_in_gpu):
    for end in ends:
        end.count_by(FLAG_KERNELS)
        if mode == "captured":
            end.captured, end.margin = True, 1
    numbers, wrong = random.Random(1), torch.zeros(1, dtype=torch.int64, device="cuda")
    pieces = [shards(call) for call in range(3)]
    gathered = [torch.cat(rows) for rows in pieces]
    for call in range(1000 if stand_in_gpu is None else 10):
        for end in ends:
            with end.side.entered():
                torch.cuda._sleep(numbers.choice([0, 0, 2_000, 50_000]))
        deliveries = [start(end, [pieces[call % 3][end.rank]] * RANKS) for end in ends]
        for delivery in deliveries:
            wrong += (FLAG_KERNELS.copy_of(delivery) != gathered[call % 3]).sum()
            delivery.end()
    assert int(wrong) == 0
    assert [int(end.status) for end in ends] == [0] * RANKS


def test_a_kernel_stores_into_the_slots_of_all(ends):
    for call in range(6):
        operands = [(torch.cat(shards(10 * call + end.rank))[:, :K], weight()[:K]) for end in ends]
        deliveries = []
        for end, pair in zip(ends, operands, strict=True):
            plan = reduce_plan(RANKS * ROWS, RANKS, end.rank, end.splits, tapered=False)
            delivery = end.begin(None, plan, K, pair[0])
            delivery.before_kernels_push()
            departures = Departures(*delivery.departures())
            scatter_linear((pair,), departures=departures, ranks=RANKS, rank=end.rank, splits=end.splits)
            deliveries.append(delivery)
        terms = torch.stack([a.float() @ w.float().T for a, w in operands])
        expected = terms.sum(0).view(RANKS, ROWS, K)
        for delivery in deliveries:
            found = total(delivery).float()
            delivery.end()
            rank = delivery.exchange.rank
            assert (found - expected[rank]).norm() < 1e-2 * expected[rank].norm()
    torch.cuda.synchronize()
    assert [int(end.status) for end in ends] == [0] * RANKS


@pytest.mark.parametrize("transport", ["symmetric", transports.IN_ROUNDS])
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_processes_on_one_gpu_compute_whole_ops(processes, sequence_parallel, transport):
    assert max(processes.run(blocks_on_one_gpu, sequence_parallel, transport, timeout=300)) < 1e-5


def test_ranks_that_share_a_gpu_unasked_are_refused(processes):
    for message in processes.run(gpu_shared_without_asking):
        assert "expected a GPU for each rank, got one for [0, 1]" in message
