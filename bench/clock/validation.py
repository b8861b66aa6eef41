"""How far the clock is from published timings: those that constants were fitted to, and those kept back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from bench.clock.published import Measured, measured
from tpkernels.gate.clock.cost import Cost, cost_of
from tpkernels.gate.clock.launch import Built
from tpkernels.gate.clock.model import Board, KernelPrediction, predict
from tpkernels.gate.clock.rates import SmRates


@dataclass(frozen=True, slots=True)
class Judged:
    of: Measured
    cost: Cost
    prediction: KernelPrediction

    @property
    def error(self) -> float:
        """Relative, as a logarithm: 0.05 is 5 % too fast."""
        return math.log(self.prediction.tflops / self.of.tflops)


class Costs:
    """Of compiled kernels, each taken once for a machine: timings of other depths share a kernel."""

    def __init__(self) -> None:
        self._built: dict[str, Built] = {}
        self._costs: dict[tuple[str, SmRates], Cost] = {}

    def __call__(self, one: Measured, machine: SmRates) -> Cost:
        key = one.key()
        if key not in self._built:
            self._built[key] = one.built()
        if (key, machine) not in self._costs:
            self._costs[key, machine] = cost_of(self._built[key], one, machine)
        return self._costs[key, machine]


def judged(
    figures: Iterable[Measured],
    machine: SmRates | None = None,
    board: Board | None = None,
    costs: Costs | None = None,
) -> Iterator[Judged]:
    costs = costs or Costs()
    for one in figures:
        cost = costs(one, machine or SmRates())
        yield Judged(one, cost, predict(cost, one, board, machine))


@dataclass(frozen=True, slots=True)
class Summary:
    """Of errors in percent."""

    figures: int
    mean: float
    spread: float  # standard deviation
    worst: float
    rank: float  # Spearman's correlation of measured and predicted

    @property
    def root_mean_square(self) -> float:
        return math.hypot(self.mean, self.spread)

    def __str__(self) -> str:
        return (
            f"{self.figures} figures, mean {self.mean:+.1f} %, spread {self.spread:.1f} %, worst "
            f"{self.worst:+.1f} %, rank correlation {self.rank:.2f}"
        )


def summary(found: Sequence[Judged]) -> Summary:
    errors = [100 * one.error for one in found]
    mean = sum(errors) / len(errors)
    spread = math.sqrt(sum((error - mean) ** 2 for error in errors) / len(errors))
    ranks = _ranks([one.of.tflops for one in found]), _ranks([one.prediction.tflops for one in found])
    return Summary(len(found), mean, spread, max(errors, key=abs), _correlation(*ranks))


def pairs_in_order(found: Sequence[Judged], apart: float = 0.05) -> tuple[int, int]:
    """Of pairs measured further apart than this: how many are predicted in that order, and all."""
    right = total = 0
    for number, one in enumerate(found):
        for other in found[:number]:
            if abs(math.log(one.of.tflops / other.of.tflops)) > apart:
                total += 1
                faster = one.of.tflops > other.of.tflops
                right += faster == (one.prediction.tflops > other.prediction.tflops)
    return right, total


def table(found: Sequence[Judged]) -> Iterator[str]:
    """In Markdown."""
    yield "| | kernel | measured | model | off | step / products alone | edge | busy | GHz |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for one in found:
        step = one.cost.step
        assert step is not None, "all of them are products"
        p = one.prediction
        yield (
            f"| {'fitted' if one.of.fitted else 'kept back'} | {one.of.name} "
            f"| {one.of.tflops:.0f} | {p.tflops:.0f} | {100 * one.error:+.1f} % "
            f"| {step.cycles:,.0f} / {one.cost.ideal:,.0f} | {one.cost.edge.cycles:,.0f} "
            f"| {p.busy:.2f} | {p.clock / 1e9:.2f} |"
        )


def report() -> Iterator[str]:
    found = list(judged(measured()))
    yield from table(found)
    yield ""
    for word, fitted in (("Fitted", True), ("Kept back", False)):
        yield f"{word}: {summary([one for one in found if one.of.fitted == fitted])}."
    for apart in (0.02, 0.05, 0.1):
        right, total = pairs_in_order(found, apart)
        yield f"Pairs more than {100 * apart:.0f} % apart in the right order: {right} of {total}."


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(values)
    return [float(order.index(value)) for value in values]


def _correlation(a: Sequence[float], b: Sequence[float]) -> float:
    n = len(a)
    return 1 - 6 * sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) / (n * (n * n - 1))
