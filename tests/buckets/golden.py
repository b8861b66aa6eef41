"""What bucket tests share: small models in float64, and the gradients that one process would get."""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.checks import error_of
from tpkernels import GradientBuckets

WIDTH = 8
SMALL = 1200  # bytes: a layer of `chain` in a bucket

Forward = Callable[[nn.Module, Tensor], Tensor]
Told = tuple[str, str]  # the type and text of an error


class Fail(torch.autograd.Function):
    """What a backward fails at."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("no gradient today")


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


def backward(module: nn.Module, number: int = 0, forward: Forward = plain) -> None:
    loss_of(forward(module, own_batch(number))).backward()


def failing(module: nn.Module, number: int = 0) -> Tensor:
    """A loss whose backward fails half-way through a chain."""
    return loss_of(module[3](module[2](Fail.apply(module[1](module[0](own_batch(number)))))))


def step(
    module: nn.Module, buckets: GradientBuckets, number: int = 0, forward: Forward = plain
) -> tuple[str, ...]:
    buckets.zero()
    backward(module, number, forward)
    return buckets.finish()


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


def assert_gradients(module: nn.Module, expected: Sequence[Tensor], **tolerance: float) -> None:
    gradients = [parameter.grad for parameter in module.parameters()]
    torch.testing.assert_close(gradients, list(expected), **tolerance)


def wrap(module: nn.Module, *, bucket_bytes: int = SMALL, **options: object) -> GradientBuckets:
    """In buckets that a layer of `chain` fills."""
    return GradientBuckets(module, dist.group.WORLD, bucket_bytes=bucket_bytes, **options)


def trained(**options: object) -> tuple[nn.Sequential, GradientBuckets]:
    """Buckets that launch in backward."""
    module = chain()
    buckets = wrap(module, **options)
    for number in range(2):
        step(module, buckets, number)
    return module, buckets


def two_by_two() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """This rank's groups of four: tensor-parallel 0 1 and 2 3, data-parallel 0 2 and 1 3."""
    rank = dist.get_rank()
    tensor_groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    data_groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return tensor_groups[rank // 2], data_groups[rank % 2]


def wrongly_told(found: Mapping[str, Told], expected: Mapping[str, Told]) -> dict[str, Told]:
    """The cases whose error is of another type, or lacks words that it was to hold."""
    assert found.keys() == expected.keys()
    return {
        case: (kind, text)
        for case, (kind, text) in found.items()
        if kind != expected[case][0] or expected[case][1] not in text
    }


def refused_on_rank_1(function: Callable[..., object], *args: object, **options: object) -> Told:
    """What all are told of a call that rank 1 alone gets wrong; the group is as good as before."""
    told = error_of(function, *args, **options)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size()
    return told
