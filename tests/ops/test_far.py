"""Groups that span machines: memory inside each, point to point between them."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist

from tests.loopback import VirtualHandle, start
from tests.on_ranks import on_ranks
from tests.ops.parallel_behaviour import message_of
from tests.ops.transport_cases import pushers, using
from tpkernels.comm.calls import begin
from tpkernels.comm.transports import c10d, shared, symmetric
from tpkernels.comm.transports.mailbox import Opening
from tpkernels.comm.transports.memory import Layout
from tpkernels.comm.transports.rendezvous import name_of_ranks
from tpkernels.ops.tensor_parallel.column_linear import column_linear


@on_ranks(2)
def test_a_later_call_may_be_read_first():
    with using("shared apart"):
        exchange = shared.open_shared(Opening("it", dist.group.WORLD, Layout(2, (1, 2), torch.float32)))
        calls = [begin("it", "gather", dist.group.WORLD) for _ in range(2)]
        for delivery in reversed([start(exchange, [torch.ones(1, 2)] * 2, call) for call in calls]):
            assert not any(map(delivery.missing, range(2)))
            assert (delivery.flags == delivery.awaited).all()
            delivery.release()
            delivery.wait()
        exchange.close()


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


@pytest.mark.parametrize("places", ["", " apart", "folders"])
@on_ranks(4)
def test_symmetric_memory_is_asked_for_among_neighbours(places):
    """By the name that torch is asked for, and this rank's number there.

    folders: every second rank has another one for torch's sockets, as in a container of its own
    """
    rank, group = dist.get_rank(), dist.group.WORLD
    folder = {"TMPDIR": "/" if places == "folders" and rank % 2 else "/tmp"}
    how = "" if places == "folders" else places
    with using(f"symmetric{how}"), patch.dict(os.environ, folder), as_on_gpus() as asked:
        first, second = (
            symmetric.open_symmetric(Opening(name, group, Layout(group.size(), (4, 2), torch.float32)))
            for name in ("a", "b")
        )
        name, again = asked
        assert name == again
        found = dist.distributed_c10d._resolve_process_group(name)
    near = [rank % 2, rank % 2 + 2] if places else [0, 1, 2, 3]
    assert (sorted(first.same_machine), found.size(), found.rank()) == (near, len(near), near.index(rank))
    assert second.rank == rank
    if places:
        assert name.endswith(f", ranks {near[0]}, {near[1]}")
    else:
        assert ", ranks" not in name  # the group itself


@pytest.mark.parametrize("fault", ["no memory", "no stream", "no thread"])
@on_ranks(2)
def test_a_rank_that_cannot_open_its_end_is_an_error_on_all_and_leaves_nothing(fault):
    """In symmetric memory others would wait in the barrier, in shared memory for rows."""
    opening = Opening("it", dist.group.WORLD, Layout(2, (4, 2), torch.float32), op="op")
    opener = shared.open_shared if fault == "no thread" else symmetric.open_symmetric
    planted: dict[str, Any] = {
        "no memory": (symmetric, "new_memory"),
        "no stream": (symmetric, "SideStream"),
        "no thread": (threading.Thread, "start"),
    }
    fails = patch.object(*planted[fault], side_effect=MemoryError("planted"))
    threads, rank = pushers(), dist.get_rank()
    with as_on_gpus() as asked, patch.object(VirtualHandle, "barrier") as barrier:
        with fails if rank == 1 else nullcontext():
            said = message_of(lambda: opener(opening))
        assert said.endswith(f"op: it on rank {rank}: rank 1 cannot take part: MemoryError: planted")
        assert (len(asked), barrier.call_count) == (fault == "no stream", 0)  # nobody waits for rank 1
        assert pushers() == threads
        opener(opening).close()


@on_ranks(2)
def test_gpus_that_torchs_barrier_does_not_reach_are_an_error_on_all():
    """Told before anybody waits in torch's rendezvous, also where one rank alone knows."""
    opening, rank = (
        Opening("it", dist.group.WORLD, Layout(2, (4, 2), torch.float32), op="op"),
        dist.get_rank(),
    )
    why = Mock(return_value="planted" if rank == 1 else "")
    with as_on_gpus() as asked, patch.object(symmetric, "why_no_barrier", why):
        said = message_of(lambda: symmetric.open_symmetric(opening))
    assert said.endswith(f"op: it on rank {rank}: rank 1 cannot take part: planted")
    assert (asked, [*why.call_args.args[0]]) == ([], [0, 1])


@on_ranks(2)
def test_neighbours_are_known_as_long_as_their_group():
    group = dist.new_group()
    name = name_of_ranks(group, [group.rank()])
    assert name_of_ranks(group, [group.rank()]) == name
    neighbours = dist.distributed_c10d._resolve_process_group(name)
    assert neighbours.group_name == name  # torch's barrier asks for it
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        neighbours.allreduce([torch.ones(1)])
    del neighbours
    dist.barrier()
    dist.destroy_process_group(group)
    del group
    gc.collect()
    with pytest.raises(RuntimeError):
        dist.distributed_c10d._resolve_process_group(name)


@on_ranks(2)
def test_a_transfer_that_cannot_start_names_the_operator():
    x, w, group = torch.randn(4, 8), torch.randn(8, 8), dist.group.WORLD
    words = f"^column_linear: rank {1 - dist.get_rank()} cannot be reached: it died"
    with using("shared apart"):
        column_linear(x, w, None, group, sequence_parallel=True)
        broken = patch.object(c10d, "start_together", side_effect=RuntimeError("broken"))
        with broken, pytest.raises(RuntimeError, match=words):
            column_linear(x, w, None, group, sequence_parallel=True)


pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-ins are for memory of the CPU")
