"""What the tests of overlapped kernels send to ranks."""

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from tests.kernels.checks import raise_if_late
from tests.loopback import start
from tpkernels.comm.transports.host import HostDelivery, HostExchange
from tpkernels.comm.transports.mailbox import MailboxDelivery, MailboxExchange, Opening
from tpkernels.comm.transports.memory import Layout
from tpkernels.comm.transports.shared import open_shared
from tpkernels.kernels.gather_linear import gather_linear_fwd
from tpkernels.kernels.linear import linear_fwd
from tpkernels.kernels.reduce import reduce_slots
from tpkernels.kernels.reference import reduce_slots_ref
from tpkernels.kernels.tiles import MatmulTile
from tpkernels.kernels.waits import Arrivals

K, N = 24, 40
TILE = MatmulTile(16, 32, 32, num_warps=4, num_stages=1, group=2)
CALLS = 6  # each slot is written three times
FAULTS = ("early_flag", "skipped_flag", "swapped_rank", "stale_slot")


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
        if self.fault == "early_flag":
            flags.fill_(delivery.flag)
            time.sleep(0.2)
            super().put(peer, there, rows, delivery)
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


def on_shared(rows: int, splits: int, delays: Sequence[float], fault: str = "") -> list[bool]:
    """On a rank: whether each gathered product, waiting for other processes, is exact."""
    exchange = opened(rows, splits)
    if fault:
        exchange.__class__, exchange.fault = Faulty, fault  # type: ignore[attr-defined]
    try:
        results = gather_calls(exchange, delays, spin_limit=5_000 if fault else None)
    finally:
        exchange.close()
    return gathered_exactly(dist.get_rank(), dist.get_world_size(), rows, results)


def reduces_on_shared(rows: int, splits: int, delays: Sequence[float]) -> list[bool]:
    """On a rank: whether each sum of what all ranks pushed is that of the oracle, to the bit."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    exchange = opened(rows, splits, dtype=torch.bfloat16)
    exact = []
    for call in range(CALLS):
        time.sleep(delays[call % len(delays)])
        parts = [
            shard_of(source, call, ranks * rows).bfloat16().unflatten(0, (ranks, rows))
            for source in range(ranks)
        ]
        delivery = start(exchange, list(parts[rank]), reducing=True)
        arrivals = arrivals_of(delivery)
        y = reduce_slots(delivery.slots, arrivals=arrivals)
        raise_if_late(arrivals, rank)
        delivery.release()
        delivery.wait()
        exact.append(torch.equal(y, reduce_slots_ref(torch.stack([part[rank] for part in parts]))))
    exchange.close()
    return exact


def absent_rank(rows: int, absent: int, how: str) -> tuple[str, float]:
    """On a rank: what one says whose peer stays away, and after how many seconds."""
    rank, started = dist.get_rank(), time.monotonic()
    exchange = opened(rows, splits=2, timeout=2.0)
    gather_calls(exchange, [0.0], calls=1)
    if rank == absent and how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        if rank == absent:
            return "stayed away", 0.0
        gather_calls(exchange, [0.0], spin_limit=3000, calls=1)
    except RuntimeError as error:
        return str(error), time.monotonic() - started
    finally:
        exchange.close()
    return "nothing", 0.0


def unread_call(rows: int) -> str:
    """On a rank: what one says whose peer never reads."""
    exchange = opened(rows, timeout=0.5)
    deliveries = []
    try:
        for call in range(3 if dist.get_rank() == 0 else 0):
            deliveries.append(start(exchange, [shard_of(0, call, rows)] * exchange.ranks))
            deliveries[-1].release()
        deliveries[-1].wait() if deliveries else None
    except RuntimeError as error:
        return str(error)
    finally:
        dist.barrier()
        exchange.close()
    return "nothing"


def leftovers(function: Callable[[], object]) -> list[str]:
    """Names in /dev/shm that a call leaves behind, but those that other programs of the machine may make."""
    before = set(os.listdir("/dev/shm"))
    function()
    made = set(os.listdir("/dev/shm")) - before
    return sorted(name for name in made if not name.startswith(("sem.", "torch_", "psm_")))


def opened_and_dropped() -> tuple[list[str], int]:
    """On a rank: what an exchange leaves in /dev/shm while open and after, and descriptors after."""
    dist.barrier()
    descriptors = len(os.listdir("/proc/self/fd"))

    def use() -> None:
        exchange = opened(4)
        gather_calls(exchange, [0.0], calls=2)
        exchange.close()

    left = leftovers(use)
    gc.collect()  # the interpreter keeps its last arguments in a cycle
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:tpkernels" in line]
    return left + mapped, len(os.listdir("/proc/self/fd")) - descriptors


def dropped_open() -> int:
    """On a rank: threads that an exchange leaves which nobody closed."""

    def pushers() -> int:
        return sum(thread.name.startswith("push of") for thread in threading.enumerate())

    gc.collect()  # what earlier tests dropped
    before = pushers()
    gather_calls(opened(4), [0.0], calls=2)
    dist.barrier()
    gc.collect()
    return pushers() - before


def different_arguments() -> str:
    """On a rank: what all say whose shapes differ."""
    try:
        opened(4 + 4 * dist.get_rank())
    except ValueError as error:
        return str(error)
    return "nothing"
