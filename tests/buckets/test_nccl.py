"""A rank alone: its buckets train, and NCCL's own memory is registered and given back, in each order."""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from tpkernels import GradientBuckets, bucketed_all_reduce_


def trains(device):
    torch.manual_seed(1)
    module = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6))).to(device)
    buckets = GradientBuckets(module, dist.group.WORLD, bucket_bytes=2**15)
    for _ in range(4):  # from the second on buckets leave during backward
        x = torch.randn(8, 64, device=device)
        expected = torch.autograd.grad(module(x).square().sum(), list(module.parameters()))
        buckets.zero()
        module(x).square().sum().backward()
        buckets.finish()
        torch.testing.assert_close([parameter.grad for parameter in module.parameters()], list(expected))
    assert buckets.launched_in_backward
    tensors = [torch.full((n,), float(n), device=device) for n in (1, 1000, 7)]
    bucketed_all_reduce_(tensors, dist.group.WORLD)
    assert [tensor.unique().tolist() for tensor in tensors] == [[1.0], [1000.0], [7.0]]


def test_buckets_in_a_world_of_one(ranks1):
    ranks1.run(trains, "cpu")


TRAINS = """
import torch.distributed as dist
from tests.buckets.test_nccl import trains

dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
trains("cuda")
dist.destroy_process_group()
"""

REGISTERS = """
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
@pytest.mark.parametrize(
    ("program", "said"), [(TRAINS, ""), (REGISTERS, "all given back\n")], ids=["trains", "registers"]
)
def test_a_rank_alone_on_a_gpu(program, said):
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert run.stdout == said
