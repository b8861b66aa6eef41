"""A rank that fails over a stand-in for NCCL, for which no host waits."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist

from tests.checks import error_of
from tests.on_ranks import of_all, on_ranks
from tests.patience import patient
from tpkernels.comm import calls
from tpkernels.comm.calls import Calls, begin, calls_of
from tpkernels.comm.transports import select, shared

SOON = 12.0  # seconds until all ranks know; about one on an idle machine


class StandIn:
    """A backend whose kernels wait until it is aborted, and with them what the host waits for."""

    def __init__(self) -> None:
        self.aborted = threading.Event()

    def abort(self) -> None:
        self.aborted.set()


def failing_op(group: dist.ProcessGroup) -> None:
    with calls_of(group):
        begin("row_linear", "sum", group)
        raise RuntimeError("planted")


def replay_in_vain(group: dist.ProcessGroup) -> None:
    """A graph waits for rows that do not come; no call of ours is made."""
    calls_of(group).memory = [Mock(missed=lambda: "RuntimeError: planted")]


@pytest.mark.parametrize("planted", [failing_op, replay_in_vain])
@on_ranks(2)
def test_all_ranks_hear_of_a_failure_though_no_host_waits(planted):
    nccl, group = StandIn(), dist.new_group()
    name = group.group_name  # of former tests' groups some have failed, and would be aborted, too
    ours = patch.object(Calls, "nccl_backends", lambda self: [nccl] if self.name == name else [])
    with patch.object(calls, "INTERVAL", 0.2), ours:
        own = calls_of(group)
        if dist.get_rank() == 1:
            with pytest.raises(RuntimeError, match="planted") if planted is failing_op else nullcontext():
                planted(group)
        assert nccl.aborted.wait(patient(SOON)), "the host waits for ever"
    kind, text = error_of(own.require_usable, "the next op")
    assert (kind, text.partition(". ")[0]) == (
        "RuntimeError",
        f"the next op: process group '{name}' has failed and cannot be used any more: rank 1: RuntimeError: "
        "planted",
    )


@pytest.mark.parametrize("asked", [True, False])
@on_ranks(2)
def test_a_time_out_of_torchs_watchdog_is_told_while_it_waits(asked):
    """It says so in the store of the world, for a minute, before it ends the processes."""
    told, group, heard = [], dist.new_group(), threading.Event()
    name = group.group_name
    ours = patch.object(Calls, "nccl_backends", lambda self: [StandIn()] if self.name == name else [])
    observers = [lambda cause: told.append(cause) or heard.set()] if asked else []
    with patch.object(calls, "INTERVAL", 0.2), patch.object(calls, "on_failure", observers), ours:
        calls_of(group)
        dist.barrier()
        if dist.get_rank() == 1:
            root = dist.distributed_c10d._get_default_store()
            while isinstance(root, dist.PrefixStore):
                root = root.underlying_store
            root.set("exception_dump", "1")
        heard.wait(patient(SOON) if asked else 1.0)
        dist.barrier()
        if dist.get_rank() == 1:
            root.delete_key("exception_dump")
    assert {*told} == (
        {"torch's watchdog of NCCL has found a time-out or an error on a rank"} if asked else set()
    )
    assert not calls_of(group).failure


@pytest.mark.parametrize("lacks", ["nothing", "memory on rank 1"])
@on_ranks(2)
def test_ranks_of_a_machine_see_how_far_others_have_come(lacks):
    """Over NCCL, which tells no host anything: the error of a device says who has not begun a call."""
    group, rank = dist.new_group(), dist.get_rank()
    fails = patch.object(shared, "new_memory", side_effect=MemoryError("planted"))
    with patch.object(Calls, "nccl_backends", lambda self: [StandIn()]):
        with fails if lacks != "nothing" and rank == 1 else nullcontext():
            select.exchanges_of("op", group, "")
        own = calls_of(group)
        assert sorted(own.pages) == ([0, 1] if lacks == "nothing" else [])
        if rank == 0:
            begin("op", "of one rank", group)
        of_all(None)  # a rank looks when the others have begun what they begin
        if rank == 0:
            with pytest.raises(torch.AcceleratorError), own:
                raise torch.AcceleratorError("launch failure")
    if rank == 0:
        where = "; rank 1 is at call 3 'ranks tell each other: opening pages of calls of process group"
        assert ("launch failure" + where in own.failure) == (lacks == "nothing")
        assert own.failure.endswith(", this rank at call 4" if lacks == "nothing" else "launch failure")
