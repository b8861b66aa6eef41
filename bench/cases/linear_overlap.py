"""How much of the transfers of column and row linear hides behind their products, on a throttled link.

Four ways are timed in turn: the products alone, the transfers alone, one after the other (`overlap=False`),
and at once. The link is as slow as makes the transfers a given part of the products' time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from bench.slow_link import throttle
from tpkernels.comm.exchange import Gathering, Reducing
from tpkernels.ops import column_linear, row_linear

TOKENS, IN, OUT_SHARD = 2048, 1024, 6144  # 4 MiB a rank travel, and a product is 26 GFLOP

Way = Callable[[], object]


@dataclass(frozen=True)
class LinearOverlap:
    """Seconds of each round, by the slowest rank."""

    products: list[float]
    transfers: list[float]
    sequential: list[float]
    overlapped: list[float]

    @property
    def efficiencies(self) -> list[float]:
        """What is saved, in parts of what could be, by round."""
        rounds = zip(self.products, self.transfers, self.sequential, self.overlapped, strict=True)
        return sorted(
            (sequential - overlapped) / (sequential - max(products, transfers))
            for products, transfers, sequential, overlapped in rounds
        )

    @property
    def efficiency(self) -> float:
        return statistics.median(self.efficiencies)

    @property
    def ratio(self) -> float:
        """Transfers in parts of the products' time."""
        return statistics.median(self.transfers) / statistics.median(self.products)

    def __str__(self) -> str:
        times = {name: statistics.median(seconds) for name, seconds in vars(self).items()}
        times["ideal"] = max(times["products"], times["transfers"])
        low, _, high = statistics.quantiles(self.efficiencies, n=4)
        listed = ", ".join(f"{name} {1e3 * seconds:.0f} ms" for name, seconds in times.items())
        return (
            f"transfers / products {self.ratio:.2f}: {listed}; efficiency {self.efficiency:.2f} "
            f"({low:.2f} to {high:.2f} in the middle half of {len(self.products)} rounds)"
        )


def measure(case: str, ratio: float, rounds: int) -> LinearOverlap:
    """On both ranks: one of column or row, forward or backward, "column forward"."""
    ways, wire_bytes = _ways(case)
    for way in ways.values():
        _seconds(way)
    throttle(8 * wire_bytes / (ratio * statistics.median(_seconds(ways["products"]) for _ in range(3))))
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for round_ in range(rounds):
        for name in names[round_ % 4 :] + names[: round_ % 4]:
            seconds[name].append(_seconds(ways[name]))
    return LinearOverlap(**seconds)


def _ways(case: str) -> tuple[dict[str, tuple[Way, Way]], int]:
    """Each way with what is done before it without being timed, and the bytes that a rank sends."""
    group = dist.group.WORLD
    assert group is not None
    torch.manual_seed(0)
    kind, direction = case.split()
    x_shard, x = torch.randn(TOKENS // 2, IN), torch.randn(TOKENS, IN)
    h = torch.randn(TOKENS, OUT_SHARD)
    w_up, w_down = torch.randn(OUT_SHARD, IN) / 32, torch.randn(IN, OUT_SHARD) / 64
    shard_bytes = x_shard.nbytes

    def gather() -> Tensor:
        return Gathering("benchmark", x_shard, TOKENS, group).wait()

    def reduce() -> Tensor:
        return Reducing("benchmark", x.__getitem__, TOKENS, IN, x, group).wait()

    def nothing() -> None: ...

    def both() -> None:
        gathering = Gathering("benchmark", x_shard, TOKENS, group)
        reduce()
        gathering.wait()

    leaf, weight, dy = (x_shard, w_up, h) if kind == "column" else (h, w_down, x_shard)
    leaf, weight = leaf.requires_grad_(), weight.requires_grad_()
    op = column_linear if kind == "column" else row_linear
    made: list[Tensor] = []

    def forward(overlap: bool) -> None:
        made[:] = [op(leaf, weight, None, group, sequence_parallel=True, overlap=overlap)]

    def backward() -> None:
        torch.autograd.grad(made[0], [leaf, weight], dy)

    whole_x, whole_dy = (x, h) if kind == "column" else (h, x)

    def product() -> Tensor:
        return whole_x @ weight.detach().T

    def two_products() -> None:
        whole_dy @ weight.detach()
        whole_dy.T @ whole_x

    if direction == "forward":
        transfers: Way = gather if kind == "column" else reduce
        return {
            "products": (nothing, product),
            "transfers": (nothing, transfers),
            "sequential": (nothing, lambda: forward(False)),
            "overlapped": (nothing, lambda: forward(True)),
        }, shard_bytes
    transfers = both if kind == "column" else gather
    return {
        "products": (nothing, two_products),
        "transfers": (nothing, transfers),
        "sequential": (lambda: forward(False), backward),
        "overlapped": (lambda: forward(True), backward),
    }, shard_bytes * (2 if kind == "column" else 1)


def _seconds(way: tuple[Way, Way]) -> float:
    """Of the slowest rank, known to all."""
    prepare, timed = way
    prepare()
    dist.barrier()
    start = time.perf_counter()
    timed()
    seconds = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()
