"""On both ranks of a throttled link: the constants of a model of it, and the ways that the model predicts.

All are timed in one run, interleaved. Constants are of single products, of transfers alone and of products
during unrelated messages; none is of an operator.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from bench.cases.linear_overlap import IN, OUT_SHARD, TOKENS, _ways, low
from bench.cases.paused_products import pause, paused_products
from bench.measure import WARM_UPS
from bench.slow_link import throttle
from tpkernels.comm.calls import begin
from tpkernels.comm.transports.rows import Gathering, sum_of_slots
from tpkernels.dispatch import primitives

CASES = ("column forward", "row forward", "column backward", "row backward")
TIMED = ("naive", "ours", "floor")
PIECES = (128, 1024, 2048)  # rows whose products are timed: between them lie those of a schedule
BESIDE, REPEATED = 128, 6  # rows of the product that is repeated while messages travel


@dataclass(frozen=True)
class Constants:
    """Seconds, by rank."""

    products: Mapping[str, Mapping[int, float]]  # kernel -> rows -> seconds
    sum: float
    zeros: float  # that weight gradients are added to
    message: float  # a shard one way
    notice: float  # a message of a row each way
    stolen: float  # of a core that multiplies, while messages go both ways
    skew: float  # between the ranks' times of one product, as a part of it


def measure(case: str, megabits: float, rounds: int) -> tuple[Constants, dict[str, float]]:
    """The second-lowest of so many rounds each; of operators by the slowest rank."""
    return _measured(case, megabits, rounds, None)


def paused(case: str, megabits: float, rounds: int) -> tuple[Constants, dict[str, float]]:
    """The same with products that wait for as long as they would take."""
    rows = TOKENS * len(_kernels(case))

    def floor() -> Sequence[Tensor]:
        pause(rows)
        return []

    with paused_products():
        return _measured(case, megabits, rounds, floor)


def _measured(
    case: str, megabits: float, rounds: int, floor: Callable[[], Sequence[Tensor]] | None
) -> tuple[Constants, dict[str, float]]:
    throttle(1e6 * megabits)
    ways, _ = _ways(case, floor)
    kernels = _kernels(case)
    timed: dict[str, Callable[[], float]] = {name: _slowest(ways[name]) for name in TIMED}
    for kernel, multiply in kernels.items():
        timed |= {f"{kernel} {rows}": _alone(partial(multiply, rows)) for rows in PIECES}
    slots = torch.randn(2, TOKENS // 2, IN)
    shard = torch.randn(TOKENS // 2, IN)
    timed["sum"] = _alone(lambda: sum_of_slots(slots, None))
    timed["zeros"] = _alone(lambda: slots.new_zeros(IN, OUT_SHARD))
    timed["message"] = _slowest((_nothing, lambda: _one_way(shard)))
    timed["notice"] = _slowest((_nothing, lambda: _gather(shard[:1])))
    first_kernel = kernels[next(iter(kernels))]
    timed["alone"] = _alone(lambda: _repeated(first_kernel))
    timed["beside"] = lambda: _beside(shard, lambda: _repeated(first_kernel))
    found: dict[str, list[float]] = {name: [] for name in timed}
    names = list(timed)
    for number in range(WARM_UPS + rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(timed[name]())
    kept = {name: taken[WARM_UPS:] for name, taken in found.items()}
    largest = torch.tensor(kept[f"{next(iter(kernels))} {PIECES[-1]}"])
    both = [torch.empty_like(largest) for _ in range(2)]
    dist.all_gather(both, largest)
    skew = (both[1] / both[0] - 1).abs().median().item()
    products = {kernel: {rows: low(kept[f"{kernel} {rows}"]) for rows in PIECES} for kernel in kernels}
    stolen = max(0.0, 1 - low(kept["alone"]) / low(kept["beside"]))
    total, zeros, message, notice = (low(kept[name]) for name in ("sum", "zeros", "message", "notice"))
    constants = Constants(products, total, zeros, message, notice, stolen, skew)
    return constants, {name: low(kept[name]) for name in TIMED}


def _nothing() -> None: ...


def _kernels(case: str) -> dict[str, Callable[[int], object]]:
    """Each product of the case, of so many rows; of wgrad so many are its depth."""
    kind, direction = case.split()
    wide, narrow = torch.randn(TOKENS, OUT_SHARD), torch.randn(TOKENS, IN)
    weight = torch.randn(OUT_SHARD, IN) / 32 if kind == "column" else torch.randn(IN, OUT_SHARD) / 64
    x, dy = (narrow, wide) if kind == "column" else (wide, narrow)
    if direction == "forward":
        return {"linear": lambda rows: primitives.linear(x[:rows], weight, None, "none", False)}
    sums = torch.zeros_like(weight)
    return {
        "dgrad": lambda rows: primitives.dgrad(dy[:rows], weight),
        "wgrad": lambda rows: primitives.wgrad_accumulate_(sums, dy[:rows], x[:rows]),
    }


def _gather(shard: Tensor) -> Tensor:
    group = dist.group.WORLD
    assert group is not None
    return Gathering(begin("benchmark", "gather", group), shard, 2 * shard.shape[0], overlap=False).wait()


def _one_way(shard: Tensor) -> None:
    if dist.get_rank():
        dist.recv(shard, 0)
    else:
        dist.send(shard, 1)


def _alone(way: Callable[[], object]) -> Callable[[], float]:
    """Both ranks at once, each by its own clock."""

    def seconds() -> float:
        dist.barrier()
        start = time.perf_counter()
        way()
        return time.perf_counter() - start

    return seconds


def _slowest(way: tuple[Callable[[], object], Callable[[], object]]) -> Callable[[], float]:
    prepare, run = way

    def seconds() -> float:
        prepare()
        dist.barrier()
        start = time.perf_counter()
        run()
        taken = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        return taken.item()

    return seconds


def _repeated(multiply: Callable[[int], object]) -> None:
    for _ in range(REPEATED):
        multiply(BESIDE)


def _beside(shard: Tensor, way: Callable[[], object]) -> float:
    """Seconds while messages go both ways, for longer than it takes."""
    dist.barrier()
    group = dist.group.WORLD
    assert group is not None
    moving = Gathering(begin("benchmark", "gather", group), shard, 2 * shard.shape[0], overlap=False)
    start = time.perf_counter()
    way()
    taken = time.perf_counter() - start
    moving.wait()
    return taken
