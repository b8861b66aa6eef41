"""Buckets in a world of one rank: on a GPU NCCL with its streams, events and averages, elsewhere gloo."""

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


PROGRAM = """
import torch.distributed as dist
from tests.comm.test_nccl import trains

dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
trains("cuda")
dist.destroy_process_group()
"""


@pytest.mark.gpu
def test_buckets_in_a_world_of_one_on_a_gpu():
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
