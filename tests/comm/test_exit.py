"""A process that ends right after a collective ends well: gloo's threads need nothing of Python's by then."""

import subprocess
import sys
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.buckets.golden import SMALL
from tpkernels import GradientBuckets

TRAIN = """
import os
import torch
import torch.distributed as dist
from tpkernels import GradientBuckets

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
module = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(module.parameters())  # imports modules that keep the default group
buckets = GradientBuckets(module, dist.group.WORLD)
buckets.zero()
module(torch.ones(1, 8)).sum().backward()
buckets.finish()
optimizer.step()
dist.destroy_process_group()
print(*(open(f"/proc/self/task/{thread}/comm").read().strip() for thread in os.listdir("/proc/self/task")))
"""


def test_destroyed_default_group_leaves_no_thread():
    run = subprocess.run([sys.executable, "-c", TRAIN], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert "gloo" not in run.stdout


HOLD = """
import atexit
import os
import time

def show_threads():
    time.sleep(0.2)  # a thread that is left lets go of its collective
    threads = os.listdir("/proc/self/task")
    print(*(open(f"/proc/self/task/{{thread}}/comm").read().strip() for thread in threads))

atexit.register(show_threads)  # handlers run from the last to the first

import torch
import torch.distributed as dist
from tpkernels import ops

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group = dist.group.WORLD
embedded = ops.vocab_embedding(torch.tensor([1, 2]), torch.ones(4, 8), group)
group.allreduce([embedded]).wait()
if {destroy}:
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("destroy", [True, False])
def test_destroyed_group_that_is_held_leaves_no_thread_to_the_end_of_python(destroy):
    run = subprocess.run(
        [sys.executable, "-c", HOLD.format(destroy=destroy)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert ("gloo" in run.stdout) is not destroy  # what runs later at exit may need a group that lives


def contexts_alive():
    """Whether what torch keeps for the length of a backward outlives it, in a collective in flight."""
    torch.manual_seed(0)
    module = nn.Linear(16, 16)
    buckets = GradientBuckets(module, dist.group.WORLD, bucket_bytes=SMALL)
    contexts = []
    module.bias.register_hook(lambda _: contexts.append(weakref.ref(torch._C._get_obj_in_tls("context"))))
    alive = []
    for _ in range(3):
        buckets.zero()
        module(torch.ones(2, 16)).sum().backward()
        alive.append(contexts[-1]() is not None)
        buckets.finish()
    assert buckets.launched_in_backward
    return alive


def test_collective_in_flight_holds_nothing_of_pythons(ranks2):
    assert ranks2.run(contexts_alive) == [[False] * 3] * 2
