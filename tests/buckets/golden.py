"""What bucket tests share: small models in float64, and the gradients that one process would get."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tpkernels import GradientBuckets

WIDTH = 8
SMALL = 1200  # bytes: a layer of `chain` in a bucket

Forward = Callable[[nn.Module, Tensor], Tensor]


def chain(layers: int = 4) -> nn.Sequential:
    """The same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(layers)]).double()


def batch(rank: int, step: int = 0) -> Tensor:
    """Every rank has its own; every rank can make all of them."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)


def own_batch(step: int = 0) -> Tensor:
    return batch(dist.get_rank(), step)


def plain(module: nn.Module, data: Tensor) -> Tensor:
    return module(data)


def loss_of(output: Tensor) -> Tensor:
    return output.pow(2).sum()


def expected_gradients(
    module: nn.Module, steps: tuple[int, ...] = (0,), forward: Forward = plain, *, average: bool = True
) -> list[Tensor]:
    """Gradients of the loss over all ranks' batches, computed here alone, without buckets or hooks."""
    ranks = dist.get_world_size()
    parameters = list(module.parameters())
    losses = [loss_of(forward(module, batch(rank, step))) for rank in range(ranks) for step in steps]
    total = torch.stack(losses).sum() / (ranks if average else 1)
    gradients = torch.autograd.grad(total, parameters, allow_unused=True)
    return [
        torch.zeros_like(parameter) if gradient is None else gradient
        for parameter, gradient in zip(parameters, gradients, strict=True)
    ]


def assert_gradients(module: nn.Module, expected: list[Tensor], **tolerance: float) -> None:
    gradients = [parameter.grad for parameter in module.parameters()]
    torch.testing.assert_close(gradients, expected, **tolerance)


def wrap(module: nn.Module, *, bucket_bytes: int = SMALL, **options: object) -> GradientBuckets:
    """In buckets that a layer of `chain` fills."""
    return GradientBuckets(module, dist.group.WORLD, bucket_bytes=bucket_bytes, **options)
