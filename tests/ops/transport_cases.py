"""What ranks run in tests of ops over transports that raise flags."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist

from tests.loopback import start, write_word
from tests.ops import exchanges
from tests.ops.parallel_behaviour import block, message_of, operands_of, with_gradients
from tests.ops.parallel_cases import Setting, prepare
from tests.ranks import COLLECTIVE_SECONDS
from tpkernels.comm.transports import mailbox, symmetric
from tpkernels.comm.transports import select as transports
from tpkernels.comm.transports.host import HostExchange
from tpkernels.comm.transports.mailbox import MailboxExchange, Opening
from tpkernels.comm.transports.memory import Layout
from tpkernels.comm.transports.order import CallOrder
from tpkernels.comm.transports.shared import Mapped, open_mapped
from tpkernels.dispatch import backends
from tpkernels.kernels import gather_linear
from tpkernels.ops.tensor_parallel.column_linear import column_linear
from tpkernels.ops.tensor_parallel.flag_waits import KERNEL_WAITS
from tpkernels.ops.tensor_parallel.row_linear import row_linear

T = TypeVar("T")


class ProcessHandle:
    """Stands for torch's `_SymmetricMemory` where the ranks are processes and the memory is the CPU's."""

    def __init__(self, memories: list[torch.Tensor], group: dist.ProcessGroup) -> None:
        self._memories, self._group = memories, group
        self.rank, self.world_size = group.rank(), len(memories)

    def get_buffer(self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self._memories[rank][: sizes[0]]

    def stream_write_value32(self, tensor: torch.Tensor, offset: int, val: int) -> None:
        write_word(tensor, offset, val)

    def barrier(self, channel: int, timeout_ms: int) -> None:
        dist.barrier(self._group)


def open_stand_in(opening: Opening) -> MailboxExchange:
    """As `open_symmetric` does, but for the memory."""
    group = opening.group

    def build(shared: Mapping[int, Mapped]) -> symmetric.SymmetricExchange:
        here, memories = list(shared), [mapped.memory for mapped in shared.values()]
        beside = group
        if len(here) < group.size():
            world_ranks = [dist.get_global_rank(group, rank) for rank in here]
            beside = dist.new_group(world_ranks, use_local_synchronization=True)
        handle, own = ProcessHandle(memories, beside), shared[group.rank()].memory
        return symmetric.SymmetricExchange(opening.name, opening.layout, handle, own, opening.timeout, here)

    exchange = open_mapped(opening, build)
    exchange.barrier(0)
    return exchange


@contextmanager
def using(transport: str, backend: str = "torch") -> Iterator[None]:
    """Until the end, transfers go as said.

    transport: one that users may wish for, or "stand-in": symmetric, in memory of the CPU; " apart" behind it
        puts ranks on two machines in turn, " alone" the last of them on a machine of its own
    """
    transport, _, places = transport.partition(" ")
    standing_in = {"symmetric": open_stand_in} if transport == "stand-in" else {}
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    place = {"": "one", "apart": f"host{rank % 2}", "alone": f"host{rank == last}"}[places]
    with (
        patch.object(mailbox, "machine", lambda: place),
        patch.object(transports, "requested_transport", "symmetric" if standing_in else transport),
        patch.object(backends, "backend", backend),
        patch.dict(transports.openers, standing_in),
    ):
        try:
            yield
        finally:
            transports._forget(
                id(dist.group.WORLD)
            )  # whose ranks agree anew, as their tests know nothing of this


def under(transport: str, backend: str, function: Callable[..., T], *args: Any) -> T:
    """Call a function of other tests with this transport."""
    with using(transport, backend):
        return function(*args)


def open_exchanges() -> list[MailboxExchange]:
    return list(transports._of_group[id(dist.group.WORLD)]._open.values())


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


def waiting_products() -> tuple[int, int]:
    """Launches of the product that waits, in forward and backward of a block: with overlap, and without."""
    prepare(Setting())
    launches = []
    for overlap in (True, False):
        with patch.object(gather_linear, "gather_linear_fwd", wraps=gather_linear.gather_linear_fwd) as spy:
            with_gradients(block, operands_of(2), sequence_parallel=True, overlap=overlap)
        launches.append(spy.call_count)
    return launches[0], launches[1]


def ready_for_a_capture() -> list[bool]:
    """Of each exchange of an all-reduce: whether it has the kernels that count calls."""
    prepare(Setting())
    with_gradients(block, operands_of(4), sequence_parallel=False)
    return [exchange.flag_kernels is not None for exchange in open_exchanges()]


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


def captured_exchanges_stay() -> list[int]:
    """Rows of what stays open after too many shapes, where a graph has captured the first."""
    with using("shared"), patch.object(transports, "MOST_OPEN", 2):
        for rows in (1, 2, 3, 4):
            x, w = torch.randn(rows, 8), torch.randn(4, 8)
            column_linear(x, w, None, dist.group.WORLD, sequence_parallel=True)
            open_exchanges()[0].captured = True
        return [exchange.shape[0] for exchange in open_exchanges()]


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


def alone() -> bool:
    def forbidden(*_: Any) -> None:
        raise AssertionError("a rank alone has nobody to talk to")

    with using("shared"), patch.object(transports, "agree", forbidden):
        with_gradients(block, operands_of(1), sequence_parallel=True)
        with_gradients(block, operands_of(1))
    return True


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


def many_shapes() -> tuple[list[int], int, int]:
    """Rows of what stays open after too many shapes, and the threads and mappings that all of it takes."""
    with using("shared"), patch.object(transports, "MOST_OPEN", 3):
        for rows in (1, 2, 3, 1, 4, 5):
            x, w = torch.randn(rows, 8), torch.randn(4, 8)
            column_linear(x, w, None, dist.group.WORLD, sequence_parallel=True)
        gc.collect()
        return [exchange.shape[0] for exchange in open_exchanges()], pushers(), _mappings()


def pushers() -> int:
    return sum(thread.name.startswith("push of") for thread in threading.enumerate())


def _mappings() -> int:
    maps = Path("/proc/self/maps").read_text().splitlines()
    return sum("memfd:tpkernels" in line for line in maps)


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


def meet(event: str) -> None:
    """Wait for all ranks, by the store: connections may be closed."""
    store = dist.distributed_c10d._get_default_store()
    if store.add(event, 1) == dist.get_world_size():
        store.set(f"{event} now", "")
    store.wait([f"{event} now"])


def be_impatient() -> None:
    """From now on only: ranks on a busy machine may come far apart to the call that opens an exchange."""
    for exchange in open_exchanges():
        exchange.timeout = 1.0


def peer_dies(transport: str, backend: str) -> None:
    """After a first call: from then on only flags tell of a rank on the same machine."""
    with using(transport, backend):
        operands = operands_of(7)
        block(*operands, sequence_parallel=True)
        be_impatient()
        if dist.get_rank() == 1:
            os._exit(7)
        block(*operands, sequence_parallel=True)


def peer_is_killed() -> None:
    """What is said of a rank that is killed, of which only memory tells, and after how many seconds."""
    with using("shared", "torch"):
        operands = operands_of(7)
        block(*operands, sequence_parallel=True)
        dist.barrier()
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        started = time.monotonic()
        message = message_of(lambda: block(*operands, sequence_parallel=True))
        raise RuntimeError(f"{time.monotonic() - started:.1f} s: {message}")


def peer_dies_while_an_exchange_opens() -> None:
    def die() -> str:
        os._exit(7)

    with using("shared"):
        if dist.get_rank() == 1:
            mailbox.machine = die
        block(*operands_of(7), sequence_parallel=True)


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


def peer_never_says_that_it_has_read() -> str:
    """What a rank says of the call that would overwrite what another may still read."""
    x, w, _ = operands_of(9)
    with using("shared"):
        silent = patch.object(HostExchange, "released") if dist.get_rank() == 1 else nullcontext()
        messages = []
        with silent:
            for _ in range(3):
                messages.append(
                    message_of(lambda: column_linear(x, w, None, dist.group.WORLD, sequence_parallel=True))
                )
                be_impatient()
    return messages[-1]


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
