"""What a benchmark compares: ways to compute the same tensors, and what is known of the work in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.counts import Counts, added, counts_of
from bench.measure import (
    WARM_UPS,
    Seconds,
    Way,
    as_graph,
    interleave,
    seconds_after_a_barrier,
    seconds_of_processor,
    seconds_on_gpu,
    slowest,
)
from tests.ranks import RankPool
from tpkernels.dispatch import backends

SHORTEST_ROUND = 2e-3  # seconds on a CPU: below, the clock and interruptions are what is seen
FEW = 3  # rounds of a case that is counted
SHORT_ON_GPU = 200e-6  # seconds: below, launches may take longer than kernels
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}  # others: 16 bits, after a few products

Computation = Callable[[], Sequence[Tensor]]


@dataclass(frozen=True)
class Work:
    """What is timed, in words and numbers. `docs/benchmarks.md` says what each means."""

    op: str
    shape: str
    pass_: str
    naive: str
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    world: int = 1
    flops: int | None = None
    bytes: int | None = None
    wire_bytes: int | None = 0
    least_ratio: float | None = None
    backend: str = field(default_factory=lambda: backends.backend)

    def __str__(self) -> str:
        return f"{self.op} {self.shape} {self.pass_}"


class Measured(NamedTuple):
    """What was found of a case; a round takes as long as on the slowest rank, and counts are of all."""

    work: Work
    seconds: Seconds
    counts: Counts | None = None


@dataclass(frozen=True)
class Case:
    """Ways to compute the same tensors, "ours" and "naive" among them.

    tolerance: how far off a way may be, by norm; by default what its dtype allows
    """

    work: Work
    ways: Mapping[str, Computation]
    tolerance: float | None = None

    def check(self) -> None:
        """Right before quick: every way agrees with the naive one as well as its dtype allows."""
        expected = self.ways["naive"]()
        for name, way in self.ways.items():
            if name == "naive":  # one that accumulates would be a term ahead
                continue
            for i, (actual, truth) in enumerate(zip(way(), expected, strict=True)):
                tolerance = self.tolerance or TOLERANCE.get(self.work.dtype, 2e-2)
                if actual.shape != truth.shape:
                    shapes = f"{tuple(actual.shape)}, expected {tuple(truth.shape)}"
                    raise AssertionError(f"{self.work}: result {i} of {name} has the shape {shapes}")
                difference, size = (actual.double() - truth.double()).norm(), truth.double().norm()
                if not difference <= tolerance * size:  # NaN is wrong, too
                    raise AssertionError(
                        f"{self.work}: result {i} of {name} is off by {float(difference / size):.1e}"
                    )

    def time(self, rounds: int, warm_ups: int = WARM_UPS) -> Seconds:
        """Checks, and then times each way in each round; on every rank alike."""
        self.check()
        if self.work.device == "cuda":
            return interleave(self._on_gpu(), rounds, seconds_on_gpu, warm_ups)
        if self.work.world > 1:
            return interleave(self.ways, rounds, seconds_after_a_barrier, warm_ups)
        calls = ceil(SHORTEST_ROUND / seconds_of_processor(5)(self.ways["naive"]))
        return interleave(self.ways, rounds, seconds_of_processor(calls), warm_ups)

    def measured(self, rounds: int, *, counted: bool) -> Measured:
        """counted: count what ours does, and time it in few rounds, against naive alone"""
        if not counted:
            return Measured(self.work, self.time(rounds))
        pair = replace(self, ways={name: self.ways[name] for name in ("ours", "naive")})
        return Measured(self.work, pair.time(FEW, warm_ups=1), counts_of(self.ways["ours"]))

    def _on_gpu(self) -> Mapping[str, Way]:
        if min(seconds_on_gpu(self.ways["naive"]) for _ in range(3)) > SHORT_ON_GPU:
            return self.ways
        return {name: as_graph(way) for name, way in self.ways.items()}


def measured_on_ranks(
    ranks: RankPool,
    build: Callable[..., Case],
    *arguments: Any,
    rounds: int,
    timeout: float = 120.0,
    counted: bool = False,
) -> Measured:
    """A case that ranks build, check and measure."""
    answers = ranks.run(_measured, build, arguments, rounds, counted, timeout=timeout)
    counts = [each.counts for each in answers if each.counts is not None]
    seconds = slowest([each.seconds for each in answers])
    return Measured(answers[0].work, seconds, added(counts) if counts else None)


def _measured(build: Callable[..., Case], arguments: Sequence[Any], rounds: int, counted: bool) -> Measured:
    return build(*arguments).measured(rounds, counted=counted)
