"""Processes end well right after a collective; whether another one still runs is seen."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.buckets.golden import SMALL
from tests.loopback import open_loopback, start
from tests.on_ranks import on_ranks
from tests.patience import patient
from tests.programs import ran, until
from tpkernels import GradientBuckets
from tpkernels.comm.transports import shared
from tpkernels.comm.transports.host import Pusher
from tpkernels.comm.transports.memory import Layout
from tpkernels.comm.transports.processes import Process, process_of

# Handlers run at exit from the last to the first. Each process is a fork of one that has imported torch.
PROGRAM = """
import atexit
import os
import time

def threads():
    return [open(f"/proc/self/task/{thread}/comm").read().strip() for thread in os.listdir("/proc/self/task")]

def show_threads():
    deadline = time.monotonic() + 30  # a thread that is left lets go of its collective
    while process != "alive" and "gloo" in str(threads()) and time.monotonic() < deadline:
        time.sleep(0.05)
    print(process, *threads())

atexit.register(show_threads)

import torch
import torch.distributed as dist
from tpkernels import GradientBuckets, ops

def train():
    module = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(module.parameters())  # imports modules that keep the default group
    buckets = GradientBuckets(module, dist.group.WORLD)
    buckets.zero()
    module(torch.ones(1, 8)).sum().backward()
    buckets.finish()
    optimizer.step()

for process in ("destroyed", "held", "alive"):
    child = os.fork()
    if child == 0:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        if process == "destroyed":
            train()
            dist.destroy_process_group()
            assert not any("gloo" in thread for thread in threads()), threads()
        else:
            group = dist.group.WORLD
            embedded = ops.vocab_embedding(torch.tensor([1, 2]), torch.ones(4, 8), group)
            group.allreduce([embedded]).wait()
            if process == "held":
                dist.destroy_process_group()
        break
    assert os.waitpid(child, 0)[1] == 0
else:
    process = "parent"
"""


def test_destroyed_group_leaves_no_thread_to_the_end_of_python_and_one_that_lives_keeps_its_own():
    command = [sys.executable, "-c", PROGRAM]
    run = subprocess.run(command, capture_output=True, text=True, timeout=patient(120))
    assert run.returncode == 0, run.stderr
    lines = [line.partition(" ") for line in run.stdout.splitlines()]
    found = {process: "gloo" in threads for process, _, threads in lines}
    # what runs later at exit may need a group that lives
    assert found == {"destroyed": False, "held": False, "alive": True, "parent": False}


@on_ranks(2)
def test_collective_in_flight_holds_nothing_of_pythons():
    """What torch keeps for the length of a backward does not outlive it."""
    torch.manual_seed(0)
    module = nn.Linear(16, 16)
    buckets = GradientBuckets(module, dist.group.WORLD, bucket_bytes=SMALL)
    contexts = []
    module.bias.register_hook(lambda _: contexts.append(weakref.ref(torch._C._get_obj_in_tls("context"))))
    for _ in range(3):
        buckets.zero()
        module(torch.ones(2, 16)).sum().backward()
        assert contexts[-1]() is None
        buckets.finish()
    assert buckets.launched_in_backward


@pytest.mark.parametrize("has_descriptors", [True, False], ids=["descriptor", "proc"])
def test_a_process_that_was_killed_has_ended_before_it_is_reaped(has_descriptors):
    refused = nullcontext() if has_descriptors else patch.object(os, "pidfd_open", side_effect=OSError)
    with subprocess.Popen(["sleep", "60"]) as running, refused:
        process = Process(running.pid)
        assert not process.has_ended()
        running.kill()
        until(process.has_ended)
        running.wait()
        assert process.has_ended()
        assert has_descriptors or Process(running.pid).has_ended()


def descriptors_of(process: int) -> int:
    """How many of ours watch it; others come and go with the garbage of other tests."""
    found = 0
    for descriptor in Path("/proc/self/fdinfo").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += f"\nPid:\t{process}\n" in descriptor.read_text()
    return found


def test_one_descriptor_serves_all_who_watch_a_process():
    with subprocess.Popen(["sleep", "60"]) as watched:
        first, second = process_of(watched.pid), process_of(watched.pid)
        assert first is second
        assert descriptors_of(watched.pid) == 1
        del first, second
        gc.collect()
        assert descriptors_of(watched.pid) == 0
        watched.kill()


def test_a_rank_that_closes_its_end_is_told_at_once():
    """Its process lives on: it may have destroyed its group, and make no more calls."""
    ends = open_loopback("it", Layout(2, (4, 3), torch.float32), timeout=30.0)
    started = time.monotonic()
    delivery = start(ends[0], [torch.ones(4, 3)] * 2)
    ends[1].close()
    with pytest.raises(RuntimeError, match=r"rows of rank 1 .*: it has destroyed its process group"):
        delivery.await_rows(slice(4, 8))
    assert time.monotonic() - started < 15  # half of its time-out
    ends[0].close()


def test_a_rank_that_closes_its_end_after_its_last_call_is_heard_out():
    ends = open_loopback("it", Layout(2, (4, 3), torch.float32), timeout=30.0)
    first, second = (start(end, [torch.full((4, 3), float(end.rank))] * 2) for end in ends)
    second.await_rows(slice(0, 8))
    second.end()
    ends[1].close()
    first.await_rows(slice(0, 8))
    assert first.memory[4:].eq(1).all()
    ends[0].close()


def test_exchanges_of_a_group_share_a_thread_but_no_failure():
    def pushing() -> int:
        return sum(thread.name == "shared by a test" for thread in threading.enumerate())

    layout, pushers = Layout(2, (4, 3), torch.float32), [Pusher("shared by a test") for _ in range(2)]
    failing, other = (open_loopback(name, layout, pushers=pushers) for name in ("failing", "other"))
    assert pushing() == 2
    with patch.object(failing[0], "wait_until_free", side_effect=OSError("planted")):
        delivery = start(failing[0], [torch.ones(4, 3)] * 2)
        with pytest.raises(OSError, match="planted"):
            delivery.end()
    with pytest.raises(OSError, match="planted"):  # an end that has lost rows sends no more
        start(failing[0], [torch.ones(4, 3)] * 2).end()
    for end in failing:
        end.close()
    deliveries = [start(end, [torch.full((4, 3), float(end.rank))] * 2) for end in other]
    for delivery in deliveries:
        delivery.await_rows(slice(0, 8))
        assert delivery.memory[4:].eq(1).all()
        assert delivery.memory[:4].eq(0).all()
        delivery.end()
    assert pushing() == 2
    for end in other:
        end.close()
        end.close()
    assert pushing() == 0


def test_a_descriptor_of_another_file_is_refused(tmp_path):
    (tmp_path / "stranger").write_bytes(bytes(64))
    with open(tmp_path / "stranger", "r+b") as file:
        number = os.fstat(file.fileno()).st_ino
        ours, theirs = ((os.getpid(), file.fileno(), number + wrong, 64) for wrong in (0, 1))
        assert shared._mapped(*ours)[:] == bytes(64)
        with pytest.raises(
            RuntimeError, match=r"reach each other's memory, it does not .*of another process"
        ):
            shared._mapped(*theirs)


def test_a_pusher_that_nobody_closes_keeps_no_process_alive():
    run = ran("-c", "from tpkernels.comm.transports.host import Pusher; Pusher('left').enter()")
    assert (run.returncode, run.stderr) == (0, "")
