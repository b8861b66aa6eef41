"""Parameters that receive given gradients, and what ranks that share memory make of them, to the bit."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

SIZES = [(5, 3), (7,), (0, 4), (), (129, 65), (1,), (33,)]  # one of 8385 elements: several blocks of a shard


class Given(nn.Module):
    """Parameters `p0`, `p1`, ... of these sizes."""

    def __init__(self, dtype: torch.dtype = torch.float32, sizes: Sequence[tuple[int, ...]] = SIZES) -> None:
        super().__init__()
        for number, size in enumerate(sizes):
            self.register_parameter(f"p{number}", nn.Parameter(torch.zeros(size, dtype=dtype)))

    def receive(
        self, gradients: Sequence[Tensor | None], through: Callable[[Tensor], Tensor] = torch.clone
    ) -> None:
        """Exactly these, by a backward: None for a parameter that is not used.

        through: what the first parameter goes through, whose gradient comes last
        """
        pairs = zip(self.parameters(), gradients, strict=True)
        products = [
            ((through(parameter) if number == 0 else parameter) * gradient).sum()
            for number, (parameter, gradient) in enumerate(pairs)
            if gradient is not None
        ]
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
    return [
        (torch.arange(parameter.numel()) % 8 + 8 * (number + 16 * (rank + 8 * step)))
        .view(parameter.shape)
        .to(parameter.dtype)
        for number, parameter in enumerate(module.parameters())
    ]


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
