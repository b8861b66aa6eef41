"""`GradientBuckets` in registered memory, with a stand-in for NCCL: who holds it, until when."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.buckets.nccl_stand_in import left_held, standing_in
from tpkernels import GradientBuckets
from tpkernels.buckets.memory import BucketMemory

pytestmark = pytest.mark.way("auto")

HAD = ["pool", "register"]
TRIED = [*HAD, "synchronize", "deregister", "freed"]  # one byte


def train(reduce, wire_dtype, wanted):
    """Registered at the end, what happened, registered after the model's gradients have gone."""
    group = dist.new_group([0, 1])
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(4))
    used = [3, 0, 1, 2]  # so that the first guess of the order is wrong
    with (
        standing_in(group) as world,
        patch.object(BucketMemory, "_why_apart", lambda memory: "they are on cuda"),
    ):
        buckets = GradientBuckets(
            layers, group, reduce=reduce, bucket_bytes=2**15, average=False, wire_dtype=wire_dtype
        )
        for _ in range(3):
            x = torch.randn(2, 64)
            expected = [torch.zeros_like(parameter) for parameter in layers.parameters()]
            for rank in range(2):
                parts = torch.autograd.grad(loss(layers, used, x, rank), list(layers.parameters()))
                expected = [total + part for total, part in zip(expected, parts, strict=True)]
            buckets.zero()
            loss(layers, used, x, dist.get_rank()).backward()
            buckets.finish()
            if reduce == "all_reduce":
                grads = [parameter.grad for parameter in layers.parameters()]
                torch.testing.assert_close(grads, expected, rtol=2e-2, atol=2e-2)
        held, said = left_held(wanted), world.said.copy()
        buckets.detach()
        grads = None
        del buckets
        layers.zero_grad()
        left = left_held(0)
        assert not world.broken, world.broken
        return held, said, left


def loss(layers, used, x, rank):
    for index in used:
        x = layers[index](x)
    return (x * (rank + 1)).sum()


@pytest.mark.parametrize(
    ("reduce", "wire_dtype", "held", "said"),
    [
        # laid out anew after the first step, in memory of its own; the first is given back
        ("all_reduce", None, 1, [*TRIED, *HAD, "time all_reduce", *HAD, *TRIED[2:]]),
        ("all_reduce", torch.bfloat16, 0, []),  # copies are sent
        ("reduce_scatter", None, 1, [*TRIED, *HAD, "time reduce_scatter"]),
    ],
    ids=["all_reduce", "copies", "reduce_scatter"],
)
def test_gradient_buckets_hold_registered_memory_while_they_need_it(ranks2, reduce, wire_dtype, held, said):
    assert ranks2.run(train, reduce, wire_dtype, held) == [(held, said, 0)] * 2
