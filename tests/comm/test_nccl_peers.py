"""A peer that is dead or elsewhere, over a backend for which the host does not wait: a stand-in for NCCL."""

from __future__ import annotations

import os
import threading
import time
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch.distributed as dist

from tests.ops.parallel_behaviour import message_of
from tests.patience import patient
from tests.ranks import RankFailure, RankPool
from tpkernels.comm import calls, watch
from tpkernels.comm.calls import GroupCalls, all_or_fail, begin

SOON = 12.0  # seconds until all ranks know; about one on an idle machine
INTERVAL = 0.2  # between two looks
SILENT = 3.0  # until a rank of another machine is taken for dead; a minute in earnest


class StandIn:
    """A backend whose kernels wait until it is aborted, and with them what the host waits for."""

    def __init__(self) -> None:
        self.aborted = threading.Event()

    def abort(self) -> None:
        self.aborted.set()


def after(fault: str, faulty: int = 1, apart: bool = False) -> str:
    """What the next call says on each rank, once the GPU has come to an end.

    apart: each rank says that it is on a machine of its own
    """
    backend, rank, group = StandIn(), dist.get_rank(), dist.new_group()
    place = f"host{rank}" if apart else calls.machine()
    name = group.group_name  # of former tests' groups some have failed, and would be aborted, too
    with (
        patch.object(watch, "INTERVAL", INTERVAL),
        patch.multiple(calls, machine=lambda: place, _SIGN=INTERVAL, _SILENT=patient(SILENT)),
        patch.object(GroupCalls, "_of_nccl", lambda self: [backend] if self.name == name else []),
    ):

        @all_or_fail
        def op(what: str) -> None:
            begin("row_linear", what, group)
            if rank == faulty and fault == "raises":
                raise RuntimeError("planted")

        if rank == faulty and fault == "raises":
            message_of(lambda: op("sum"))
        else:
            op("another sum" if rank == faulty and fault == "parted" else "sum")
        if rank == faulty and fault == "dies":
            time.sleep(5 * INTERVAL)  # the others have looked at it
            os._exit(3)
        gone = nullcontext()
        if fault == "dies" and not faulty:  # with rank 0 the store ends, as under torchrun
            time.sleep(4 * INTERVAL)
            gone = patch.object(GroupCalls, "_store", side_effect=RuntimeError("no store"))
        with gone:
            assert backend.aborted.wait(patient(SOON)), "the host waits for ever"
        said = message_of(lambda: calls.calls_of(group).require_usable("the next op"))
        if fault == "dies":
            print(said, flush=True)
            raise AssertionError(said)  # for the pool tells of nothing but its dead rank
    return said


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("raises", "has failed and cannot be used any more: rank 1: RuntimeError: planted"),
        ("parted", "left the common order of calls: call 1 is 'row_linear: "),
    ],
)
def test_all_ranks_hear_of_a_failure_though_no_host_waits(ranks2, fault, told):
    for said in ranks2.run(after, fault):
        assert told in said


@pytest.mark.parametrize("dead", [0, 1])
def test_a_process_that_has_ended_is_named_with_the_call_that_waits_for_it(dead):
    """The store may have ended with it."""
    with RankPool(2) as own, pytest.raises(RankFailure) as failure:
        own.run(after, "dies", dead)
    assert f"the process of rank {dead} has ended, before call 1 'row_linear: sum' has" in str(failure.value)


def test_a_rank_of_another_machine_that_gives_no_sign_of_life_is_named():
    """Its process cannot be looked at. A rank that lives gives signs, though it makes no call."""
    with RankPool(2) as own, pytest.raises(RankFailure) as failure:
        own.run(after, "dies", 1, True)
    said = "rank 1 of another machine has given no sign of life for"
    assert said in str(failure.value)
    assert "before call 1 'row_linear: sum' has ended" in str(failure.value)
