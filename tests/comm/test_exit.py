"""A process that ends right after a collective ends well: gloo's threads need nothing of Python's by then."""

import subprocess
import sys
import weakref

import torch
import torch.distributed as dist
from torch import nn

from tests.buckets.golden import SMALL
from tests.on_ranks import on_ranks
from tests.patience import patient
from tpkernels import GradientBuckets

# Handlers run at exit from the last to the first. Each process is a fork of one that has imported torch.
PROGRAM = """
import atexit
import os
import time

def threads():
    return [open(f"/proc/self/task/{thread}/comm").read().strip() for thread in os.listdir("/proc/self/task")]

def show_threads():
    time.sleep(0.2)  # a thread that is left lets go of its collective
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
    run = subprocess.run(command, capture_output=True, text=True, timeout=patient(60))
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
