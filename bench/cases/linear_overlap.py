"""How much of the transfers of column and row linear hides behind their products, on a throttled link.

Four ways are timed in turn: the products alone, the transfers alone, one after the other (`overlap=False`),
and at once. The link is as slow as makes the transfers a given part of the products' time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from bench.case import Case, Computation, Work
from bench.measure import Seconds, Way, interleave
from bench.slow_link import throttle
from tpkernels.comm.calls import begin
from tpkernels.comm.transports.rows import Gathering, Reducing
from tpkernels.ops import column_linear, row_linear

TOKENS, IN, OUT_SHARD = 2048, 1024, 6144  # 4 MiB a rank travel, and a product is 26 GFLOP


@dataclass(frozen=True)
class LinearOverlap:
    """Seconds of each round, by the slowest rank."""

    products: list[float]
    transfers: list[float]
    naive: list[float]  # one after the other
    ours: list[float]  # at once

    @property
    def efficiencies(self) -> list[float]:
        """What is saved, in parts of what could be, by round."""
        rounds = zip(self.products, self.transfers, self.naive, self.ours, strict=True)
        return sorted(
            (naive - ours) / (naive - max(products, transfers)) for products, transfers, naive, ours in rounds
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


def measure(case: str, ratio: float, rounds: int) -> tuple[Work, Seconds]:
    """On both ranks: one of column or row, forward or backward, "column forward"."""
    ways, wire_bytes = _ways(case)
    kind, direction = case.split()
    work = Work(
        op=f"{kind}_linear",
        shape=f"{TOKENS}x{IN}x{OUT_SHARD}-slow_link{ratio}-world2",
        pass_=direction,
        naive="the same without overlap",
        world=2,
        flops=(2 if direction == "backward" else 1) * 2 * TOKENS * IN * OUT_SHARD,
        wire_bytes=wire_bytes,
    )
    Case(work, {name: _computation(ways[name]) for name in ("ours", "naive")}).check()
    throttle(8 * wire_bytes / (ratio * statistics.median(_seconds(ways["products"]) for _ in range(4))))
    return work, interleave(ways, rounds, _seconds)


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
        return Gathering(begin("benchmark", "gather", group), x_shard, TOKENS).wait()

    def reduce() -> Tensor:
        return Reducing(begin("benchmark", "sum", group), x.__getitem__, TOKENS, IN, x).wait()

    def nothing() -> None: ...

    def both() -> None:
        gathering = Gathering(begin("benchmark", "gather", group), x_shard, TOKENS)
        reduce()
        gathering.wait()

    leaf, weight, dy = (x_shard, w_up, h) if kind == "column" else (h, w_down, x_shard)
    leaf, weight = leaf.requires_grad_(), weight.requires_grad_()
    op = column_linear if kind == "column" else row_linear
    made: list[Tensor] = []

    def forward(overlap: bool) -> Sequence[Tensor]:
        made[:] = [op(leaf, weight, None, group, sequence_parallel=True, overlap=overlap)]
        return made

    def backward() -> Sequence[Tensor]:
        return torch.autograd.grad(made[0], [leaf, weight], dy)

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
            "naive": (nothing, lambda: forward(False)),
            "ours": (nothing, lambda: forward(True)),
        }, shard_bytes
    transfers = both if kind == "column" else gather
    return {
        "products": (nothing, two_products),
        "transfers": (nothing, transfers),
        "naive": (lambda: forward(False), backward),
        "ours": (lambda: forward(True), backward),
    }, shard_bytes * (2 if kind == "column" else 1)


def _computation(way: tuple[Way, Way]) -> Computation:
    prepare, timed = way

    def run() -> Sequence[Tensor]:
        prepare()
        return cast("Sequence[Tensor]", timed())

    return run


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
