"""What ranks run in tests of copies that are compared by themselves."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_ as one_ranks_clip_grad_norm_

from tests.checks import error_of
from tests.layers.behaviour import Block, built, tokens
from tests.layers.parity import K, N, drawn
from tpkernels import (
    ColumnParallelLinear,
    RMSNorm,
    clip_grad_norm_,
    finalize_gradients,
    initialize_model_parallel,
    parallelize,
)
from tpkernels.buckets.safeguards import sums_of_bits
from tpkernels.layers import watch
from tpkernels.layers.attributes import Attributes

Clip = Callable[..., object]


@contextmanager
def every(steps: int):
    """As if TPKERNELS_CHECK_REPLICAS had been this."""
    outside = watch.steps_between
    watch.steps_between = steps
    try:
        yield
    finally:
        watch.steps_between = outside


def steps_until_told(
    clip: Clip, interval: int, steps: int, finalize: bool = True
) -> tuple[int, tuple[str, str]]:
    """How many steps a plain loop takes, and the error that ends it."""
    block = built()
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
    with every(interval):
        for step in range(steps):
            said = error_of(one_step, block, optimizer, step, clip, finalize)
            if said != ("nothing", ""):
                return step + 1, said
    return steps, ("nothing", "")


def one_step(block: Block, optimizer: torch.optim.Optimizer, step: int, clip: Clip, finalize: bool) -> None:
    optimizer.zero_grad()
    for part in range(2):  # gradients are accumulated
        block(tokens(10 * step + part)).square().mean().backward()
    with torch.no_grad():
        if dist.get_rank() == 0:
            block.norm(tokens())  # not every rank need look at its own
    if finalize:
        finalize_gradients(block)
    clip(block.parameters(), 0.01)
    optimizer.step()


def by_torch(interval: int) -> tuple[int, tuple[str, str]]:
    return steps_until_told(one_ranks_clip_grad_norm_, interval, 7)


def other_data(interval: int) -> tuple[int, tuple[str, str]]:
    """Each tensor-parallel rank reads a batch of its own, as a prepared DataLoader would have it."""
    initialize_model_parallel(dist.get_world_size())
    torch.manual_seed(7)
    model = nn.Sequential(RMSNorm(K), Features(ColumnParallelLinear(K, N)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with every(interval):
        for step in range(7):
            optimizer.zero_grad()
            model(drawn((4, K), dist.get_rank(), torch.float32)).square().mean().backward()
            said = error_of(optimizer.step)
            if said != ("nothing", ""):
                return step + 1, said
    return 7, ("nothing", "")


class Features(nn.Module):
    """Of a layer's (output, output_bias)."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


def by_ours() -> tuple[int, tuple[str, str]]:
    return steps_until_told(clip_grad_norm_, 1, 4)


def unsummed(interval: int) -> tuple[int, tuple[str, str]]:
    return steps_until_told(lambda *_: None, interval, 7, finalize=False)


def of_another_model() -> tuple[str, str]:
    """Optimizers of models that are not split, or of several tensor groups, are left alone."""
    plain = nn.Linear(4, 4)
    with torch.no_grad():
        plain.weight.fill_(dist.get_rank())
    plain.weight.grad = torch.ones(4, 4)
    with every(1):
        return error_of(torch.optim.AdamW(plain.parameters()).step)


def skipped_on_one_rank() -> tuple[str, str]:
    """Rank 0 takes a step that the others skip, as each GradScaler decides for itself."""
    block = built()
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
    whole, watch.c10d.default_timeout = watch.c10d.default_timeout, lambda: timedelta(seconds=1)
    try:
        with every(1):
            return error_of(optimizer.step) if dist.get_rank() == 0 else ("nothing", "")
    finally:
        watch.c10d.default_timeout = whole


def two_models() -> list[tuple[str, str]]:
    """Each optimizer is counted by itself; only the second drifts. A parallelized model tells of itself."""
    block = built()
    torch.manual_seed(3)
    model = parallelize(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8)), plan={"1": "head"})
    first, second = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (block, model))
    said = []
    with every(2):
        for _ in range(2):
            block(tokens()).square().mean().backward()
            finalize_gradients(block)
            said.append(error_of(first.step))
            model[0].weight.grad = torch.full((4,), float(dist.get_rank()))
            said.append(error_of(second.step))
    return said


def sums_of(kind: str) -> bool:
    """Whether sums of bits see a change: of a bit, of the sign of zero, of two elements' places."""
    torch.manual_seed(1)
    tensor = torch.randn(3, 1100).to(getattr(torch, kind))
    if kind.startswith("complex"):
        return sums_of_bits([tensor]) != sums_of_bits([tensor * 2])
    tensor[0, 0] = 0.0
    (sum_of_all,) = sums_of_bits([tensor])
    swapped, negative, bit = tensor.clone(), tensor.clone(), tensor.clone()
    swapped[0, :2] = tensor[0, :2].flip(0)
    negative[0, 0] = -0.0
    flipped = bit.view(-1).view(torch.uint8)
    flipped[-1] ^= 1
    strided = tensor.t().contiguous().t()
    odd = tensor.view(-1)[1:12]  # neither begins nor ends where a word does
    changed = [sums_of_bits([other])[0] != sum_of_all for other in (swapped, negative, bit)]
    same = [(strided, tensor), (odd, odd.clone())]
    return all(changed) and all(sums_of_bits([a]) == sums_of_bits([b]) for a, b in same)


def fewer_on_one_rank() -> tuple[str, str]:
    """Rank 1 trains one copy less."""
    block = built()
    parameters = list(block.parameters())
    block.norm.weight.requires_grad_(False)
    kept = [p for p in parameters if p.requires_grad or dist.get_rank() == 0]
    with every(1):
        return error_of(torch.optim.SGD(kept, lr=0.1).step)


def marked_experts() -> tuple[str, str]:
    """Megatron's experts are each rank's own."""
    block = built()
    block.norm.weight.allreduce = False
    with torch.no_grad():
        block.norm.weight.mul_(1 + dist.get_rank())
    with every(1):
        return error_of(torch.optim.SGD(block.parameters(), lr=0.1).step)


def shards_of_data_ranks() -> list[tuple[str, str]]:
    """Under fully_shard over data-parallel ranks, copies are compared shard by shard."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = parallelize(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)), mesh, plan={"1": "head"})
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    said = []
    with every(1):
        for drifting in (False, True):
            model(torch.ones(2, 8)).square().sum().backward()
            for parameter in (p for p in model.parameters() if not Attributes.of(p).tensor_model_parallel):
                parameter.grad.zero_()  # what it is without a sum over what follows is not the point here
                if drifting:
                    parameter.grad.add_(mesh.get_local_rank("tp"))
            said.append(error_of(optimizer.step))
    return said
