"""Groups that span machines: memory inside each, point to point between them."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.loopback import VirtualHandle, start
from tests.ops.parallel_behaviour import message_of
from tests.ops.transport_cases import open_exchanges, pushers, using
from tpkernels.comm.calls import begin
from tpkernels.comm.transports import c10d, shared, symmetric
from tpkernels.comm.transports.c10d import Transfers
from tpkernels.comm.transports.mailbox import Opening
from tpkernels.comm.transports.memory import Layout
from tpkernels.comm.transports.rendezvous import name_of_ranks
from tpkernels.ops.tensor_parallel.column_linear import column_linear
from tpkernels.ops.tensor_parallel.row_linear import row_linear


def peers_by_way() -> tuple[list[int], list[int], list[int]]:
    """On a machine with every other rank: whom a gather and a reduce send to, and whose memory is mapped."""
    sent, group = [], dist.group.WORLD
    spied = patch.object(Transfers, "exchange", autospec=True, side_effect=Transfers.exchange)
    x, w = torch.randn(4, 8), torch.randn(8, 8)
    with using("shared apart"):
        for op in (column_linear, row_linear):
            op(x, w, None, group, sequence_parallel=True)  # ranks open the exchange, too
            with spied as spy:
                op(x, w, None, group, sequence_parallel=True)
            calls = [call.args for call in spy.call_args_list]
            sent.append(sorted({to for _, to, outgoing, *_ in calls if outgoing.numel()}))
        return sent[0], sent[1], sorted(open_exchanges()[0].same_machine)


def later_call_read_first() -> tuple[list[bool], list[bool]]:
    """Which flags are up after the second call was read, then after the first."""
    with using("shared apart"):
        exchange = shared.open_shared(Opening("it", dist.group.WORLD, Layout(2, (1, 2), torch.float32)))
        found = []
        calls = [begin("it", "gather", dist.group.WORLD) for _ in range(2)]
        for delivery in reversed([start(exchange, [torch.ones(1, 2)] * 2, call) for call in calls]):
            assert not any(map(delivery.missing, range(2)))
            found.append((delivery.flags == delivery.awaited).tolist())
            delivery.release()
            delivery.wait()
        exchange.close()
        return found[0], found[1]


@contextmanager
def as_on_gpus() -> Iterator[list[str]]:
    """Symmetric memory opens on memory of the CPU, of each rank alone; the names that torch is asked for."""
    asked: list[str] = []

    def rendezvous(memory: torch.Tensor, name: str) -> VirtualHandle:
        asked.append(name)
        group = dist.distributed_c10d._resolve_process_group(name)
        return VirtualHandle([memory] * group.size(), group.rank())

    with (
        patch.object(symmetric, "why_not", return_value=""),
        patch.object(symmetric, "require_gpu_each", return_value=False),
        patch.object(torch.cuda, "get_device_properties"),
        patch.object(symmetric, "new_memory", lambda count, device: torch.zeros(count, dtype=torch.uint8)),
        patch.object(symmetric, "rendezvous", rendezvous),
    ):
        yield asked


def opened_symmetric(places: str) -> tuple[str, int, int, list[int], int]:
    """The name that torch is asked for, with this rank's number and size there; and what comes of it."""
    with using(f"symmetric{places}"), as_on_gpus() as asked:
        group = dist.group.WORLD
        first, second = (
            symmetric.open_symmetric(Opening(name, group, Layout(group.size(), (4, 2), torch.float32)))
            for name in ("a", "b")
        )
        assert asked == [asked[0]] * 2
        found = dist.distributed_c10d._resolve_process_group(asked[0])
        return asked[0], found.rank(), found.size(), sorted(first.same_machine), second.rank


def fails_on_the_last_rank(fault: str) -> tuple[str, int, int, int, str]:
    """(what is said, rendezvous, barriers, threads) if one rank cannot open its end; a second try."""
    layout = Layout(dist.get_world_size(), (4, 2), torch.float32)
    opening = Opening("it", dist.group.WORLD, layout, op="op")
    opener = shared.open_shared if fault == "no thread" else symmetric.open_symmetric
    planted: dict[str, Any] = {
        "no memory": (symmetric, "new_memory"),
        "no stream": (symmetric, "SideStream"),
        "no thread": (threading.Thread, "start"),
    }
    fails = patch.object(*planted[fault], side_effect=MemoryError("planted"))
    threads = pushers()
    with as_on_gpus() as asked, patch.object(VirtualHandle, "barrier") as barrier:
        with fails if dist.get_rank() == dist.get_world_size() - 1 else nullcontext():
            said = message_of(lambda: opener(opening))
        found = said, len(asked), barrier.call_count, pushers() - threads
        return *found, message_of(lambda: opener(opening).close())


def neighbours_of_a_group_that_ends() -> list[bool]:
    """Whether torch knows the name of neighbours: while their group lives, then no more."""
    group = dist.new_group()
    name = name_of_ranks(group, [group.rank()])
    assert name_of_ranks(group, [group.rank()]) == name
    known = [_is_known(name)]
    dist.barrier()
    dist.destroy_process_group(group)
    del group
    gc.collect()
    return [*known, _is_known(name)]


def _is_known(name: str) -> bool:
    try:
        dist.distributed_c10d._resolve_process_group(name)
    except RuntimeError:
        return False
    return True


def broken_swap() -> str:
    """What is said of a transfer that cannot even start."""
    x, w = torch.randn(4, 8), torch.randn(8, 8)
    with using("shared apart"):
        column_linear(x, w, None, dist.group.WORLD, sequence_parallel=True)
        with patch.object(c10d, "start_together", side_effect=RuntimeError("broken")):
            return message_of(lambda: column_linear(x, w, None, dist.group.WORLD, sequence_parallel=True))


pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-ins are for memory of the CPU")


def test_only_rows_for_other_machines_are_sent(ranks4):
    for rank, (gathered_to, reduced_to, near) in enumerate(ranks4.run(peers_by_way)):
        assert gathered_to == reduced_to == [1 - rank % 2, 3 - rank % 2]
        assert near == [rank % 2, rank % 2 + 2]


def test_a_later_call_may_be_read_first(ranks2):
    assert ranks2.run(later_call_read_first) == [([True] * 2, [True] * 2)] * 2


def test_symmetric_memory_is_asked_for_among_neighbours(ranks4):
    found = ranks4.run(opened_symmetric, " apart")
    assert [number for _, number, *_ in found] == [0, 0, 1, 1]
    for rank, (name, _, size, near, number) in enumerate(found):
        assert size == 2
        assert name.endswith(f", ranks {rank % 2}, {rank % 2 + 2}")
        assert (near, number) == ([rank % 2, rank % 2 + 2], rank)
    for rank, (name, number, size, near, _) in enumerate(ranks4.run(opened_symmetric, "")):
        assert (number, size, near) == (rank, 4, [0, 1, 2, 3])
        assert ", ranks" not in name  # the group itself


@pytest.mark.parametrize("fault", ["no memory", "no stream", "no thread"])
def test_a_rank_that_cannot_open_its_end_is_an_error_on_all_and_leaves_nothing(ranks2, fault):
    """In symmetric memory others would wait in the barrier, in shared memory for rows."""
    for rank, found in enumerate(ranks2.run(fails_on_the_last_rank, fault)):
        said, rendezvous, barriers, threads, again = found
        assert said.endswith(f"op: it on rank {rank}: rank 1 cannot take part: MemoryError: planted")
        assert (rendezvous, barriers, threads) == (fault == "no stream", 0, 0)  # nobody waits for rank 1
        assert again == "no error"


def test_neighbours_are_known_as_long_as_their_group(ranks2):
    assert ranks2.run(neighbours_of_a_group_that_ends) == [[True, False]] * 2


def test_a_transfer_that_cannot_start_names_the_operator(ranks2):
    for rank, message in enumerate(ranks2.run(broken_swap)):
        assert message.startswith(f"RuntimeError: column_linear: rank {1 - rank} cannot be reached: it died")
