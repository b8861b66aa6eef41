"""What bucket tests share: small models in float64, and the gradients that one process would get."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.checks import error_of
from tests.on_ranks import equal_on_all
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
    pairs = zip(parameters, gradients, strict=True)
    return [torch.zeros_like(parameter) if gradient is None else gradient for parameter, gradient in pairs]


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


def refused_on_rank_1(function: Callable[..., object], *args: object, **options: object) -> Told:
    """What all are told of a call that rank 1 alone gets wrong; the group is as good as before."""
    return equal_on_all(error_of(function, *args, **options))


SIZES = [(5, 3), (7,), (0, 4), (), (129, 65), (1,), (33,)]  # one of 8385 elements: several blocks of a shard


class Given(nn.Module):
    """Parameters `p0`, `p1`, ... of these sizes."""

    def __init__(self, dtype: torch.dtype = torch.float32, sizes: Sequence[tuple[int, ...]] = SIZES) -> None:
        super().__init__()
        for number, size in enumerate(sizes):
            self.register_parameter(f"p{number}", nn.Parameter(torch.zeros(size, dtype=dtype)))

    def receive(self, gradients: Sequence[Tensor | None]) -> None:
        """Exactly these, by a backward: None for a parameter that is not used."""
        pairs = zip(self.parameters(), gradients, strict=True)
        products = [(parameter * gradient).sum() for parameter, gradient in pairs if gradient is not None]
        if products:
            torch.stack(products).sum().backward()

    def gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.parameters()]


def wild(module: nn.Module, rank: int, step: int) -> list[Tensor]:
    """Gradients whose sums are rounded, and depend on the order."""
    generator = torch.Generator().manual_seed(100 * step + rank)

    def like(parameter: Tensor) -> Tensor:
        values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        return values * 10 ** (4 * torch.rand(parameter.shape, generator=generator, dtype=torch.float64) - 2)

    return [like(parameter).to(parameter.dtype) for parameter in module.parameters()]


def whole(module: nn.Module, rank: int, step: int) -> list[Tensor]:
    """Whole numbers below 2**19, which add up exactly, and which no other rank or step has."""
    found = []
    for number, parameter in enumerate(module.parameters()):
        values = torch.arange(parameter.numel()) % 8 + 8 * (number + 16 * (rank + 8 * step))
        found.append(values.view(parameter.shape).to(parameter.dtype))
    return found


def added_up(
    of_ranks: Sequence[Sequence[Tensor]], result: torch.dtype, wide: torch.dtype, *, average: bool
) -> list[Tensor]:
    """In the order of ranks, then divided, then rounded: each once."""
    sums = []
    for first, *others in zip(*of_ranks, strict=True):
        total = first.to(wide)
        for other in others:
            total = total + other.to(wide)
        sums.append((total / len(of_ranks) if average else total).to(result))
    return sums


def bits(tensors: Sequence[Tensor]) -> list[bytes]:
    return [tensor.detach().flatten().view(torch.uint8).numpy().tobytes() for tensor in tensors]


def shared_maps() -> int:
    """How often memory that ranks share for buckets is mapped in this process."""
    return Path("/proc/self/maps").read_text().count("memfd:tpkernels gradient buckets")


def lies_in_shared_memory(tensor: Tensor) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(address, 16) for address in line.split()[0].split("-"))
        if first <= tensor.data_ptr() < last:
            return "memfd:tpkernels gradient buckets" in line
    return False
