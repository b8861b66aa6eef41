"""Memory that ranks cannot share, and transfers that cannot start: an error on all of them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist

from tests.loopback import VirtualHandle
from tests.on_ranks import on_ranks
from tests.ops.parallel_behaviour import message_of
from tests.ops.test_collectives import collectives
from tests.ops.transport_cases import pushers, using
from tpkernels.comm.transports import c10d, shared, symmetric
from tpkernels.comm.transports.mailbox import Opening
from tpkernels.comm.transports.memory import Layout
from tpkernels.ops.tensor_parallel.column_linear import column_linear


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
        patch.object(symmetric, "why_no_stream_writes", return_value=""),
        patch.object(symmetric, "rendezvous", rendezvous),
    ):
        yield asked


@on_ranks(2)
def test_symmetric_memory_is_asked_for_by_the_name_of_the_group():
    group = dist.group.WORLD
    with as_on_gpus() as asked:
        first, second = (
            symmetric.open_symmetric(Opening(name, group, Layout(2, (4, 2), torch.float32))) for name in "ab"
        )
    assert asked == [group.group_name] * 2
    assert first.rank == second.rank == group.rank()


@on_ranks(4)
def test_ranks_that_find_no_sockets_of_each_other_are_an_error_on_all():
    """Every second rank has another folder for torch's sockets, as in a container of its own."""
    opening = Opening("it", dist.group.WORLD, Layout(4, (4, 2), torch.float32), op="op")
    folder = {"TMPDIR": "/" if dist.get_rank() % 2 else "/tmp"}
    with patch.dict(os.environ, folder), as_on_gpus() as asked:
        said = message_of(lambda: symmetric.open_symmetric(opening))
    assert "op: it: torch hands memory over by sockets in TMPDIR, which is another folder" in said
    assert asked == []


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


@pytest.mark.parametrize("lacking", ["why_no_barrier", "why_no_stream_writes"])
@on_ranks(2)
def test_gpus_that_lack_what_calls_need_are_an_error_on_all(lacking):
    """Told before anybody waits in torch's rendezvous, also where one rank alone knows."""
    opening, rank = (
        Opening("it", dist.group.WORLD, Layout(2, (4, 2), torch.float32), op="op"),
        dist.get_rank(),
    )
    why = Mock(return_value="planted" if rank == 1 else "")
    with as_on_gpus() as asked, patch.object(symmetric, lacking, why):
        said = message_of(lambda: symmetric.open_symmetric(opening))
    assert said.endswith(f"op: it on rank {rank}: rank 1 cannot take part: planted")
    assert asked == []
    assert [*why.call_args.args[0]] == [0, 1] or lacking != "why_no_barrier"


@pytest.mark.parametrize("start", ["start_all_gather", "start_together", "send"])
@on_ranks(2)
def test_a_transfer_that_cannot_start_names_the_operator(start):
    """A collective, messages that are launched together, and the message that announces a call."""
    x, w, group = torch.randn(4, 8), torch.randn(8, 8), dist.group.WORLD
    words = f"^column_linear: rank {1 - dist.get_rank()} cannot be reached: it died"
    owner = dist.ProcessGroup if start == "send" else c10d
    broken = patch.object(owner, start, side_effect=RuntimeError("broken"))
    with using("c10d"), collectives({"start_all_gather": 1, "start_together": 2}.get(start)):
        column_linear(x, w, None, group, sequence_parallel=True)
        with broken, pytest.raises(RuntimeError, match=words):
            column_linear(x, w, None, group, sequence_parallel=True)


pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-ins are for memory of the CPU")
