"""Buckets in a world of one rank: on a GPU NCCL with its streams, events and averages, elsewhere gloo."""

import subprocess
import sys

import pytest

PROGRAM = """
import torch
import torch.distributed as dist
from tpkernels import GradientBuckets, bucketed_all_reduce_

backend, device = {backend!r}, {device!r}
dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
torch.manual_seed(1)
module = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6))).to(device)
buckets = GradientBuckets(module, dist.group.WORLD, bucket_bytes=2**15)
for step in range(4):  # from the second on buckets leave during backward
    x = torch.randn(8, 64, device=device)
    expected = torch.autograd.grad(module(x).square().sum(), list(module.parameters()))
    buckets.zero()
    module(x).square().sum().backward()
    buckets.finish()
    for parameter, grad in zip(module.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, grad)
assert buckets.launched_in_backward
tensors = [torch.full((n,), float(n), device=device) for n in (1, 1000, 7)]
bucketed_all_reduce_(tensors, dist.group.WORLD)
assert [tensor.unique().tolist() for tensor in tensors] == [[1.0], [1000.0], [7.0]]
dist.destroy_process_group()
print("all equal")
"""


@pytest.mark.parametrize(
    ("backend", "device"), [("gloo", "cpu"), pytest.param("nccl", "cuda", marks=pytest.mark.gpu)]
)
def test_buckets_in_a_world_of_one(backend, device):
    program = PROGRAM.format(backend=backend, device=device)
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "all equal\n"
