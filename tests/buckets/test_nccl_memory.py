"""NCCL's own memory, on a GPU: a rank alone registers it, reduces in it and gives it back, in each order."""

import subprocess
import sys

import pytest

PROGRAM = """
import torch
import torch.distributed as dist
from tpkernels.buckets import registered
from tpkernels.buckets.reduction_times import milliseconds, reduce

device = torch.device("cuda", 0)
torch.cuda.set_device(device)

def allocated():
    group = dist.new_group([0])
    registered.connected_by_all(group, device)
    dtypes = [torch.bfloat16, torch.float32]
    flats, plain = registered.registered_by_all(group, [1000, 2**22], dtypes, device, 1)
    times = milliseconds(group, [flats[1], *plain], "all_reduce")
    assert min(times) > 0, times
    for flat in flats:
        flat.fill_(3)
        reduce(group, flat, "all_reduce")
        reduce(group, flat, "reduce_scatter")
        assert flat.eq(3).all()
    return group, flats, plain

def left():
    registered.give_back_unused()
    return len(registered._held)

dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
assert registered.nccl_memory.why_not(dist.group.WORLD, device) == ""
for _ in range(3):  # an address that comes again is registered anew
    group, flats, plain = allocated()
    before = torch.cuda.memory_reserved()
    assert left() == 1
    view = flats[1][5:7]
    del flats, plain
    assert left() == 1
    assert view.eq(3).all()
    del view
    assert left() == 0
    assert torch.cuda.memory_reserved() < before
    dist.destroy_process_group(group)
group, flats, plain = allocated()
dist.destroy_process_group(group)
assert left() == 1
assert flats[1].eq(3).all()
del flats
assert left() == 0
group, flats, plain = allocated()  # and the process ends with both
dist.destroy_process_group()
print("all given back")
"""


@pytest.mark.gpu
def test_memory_is_registered_reduced_and_given_back():
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "all given back\n"
