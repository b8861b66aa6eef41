"""What a benchmark compares: ways to compute the same tensors, and what is known of the work in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any

import torch
from torch import Tensor

from bench.measure import (
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

    def time(self, rounds: int) -> Seconds:
        """Checks, and then times each way in each round; on every rank alike."""
        self.check()
        if self.work.device == "cuda":
            return interleave(self._on_gpu(), rounds, seconds_on_gpu)
        if self.work.world > 1:
            return interleave(self.ways, rounds, seconds_after_a_barrier)
        calls = ceil(SHORTEST_ROUND / seconds_of_processor(5)(self.ways["naive"]))
        return interleave(self.ways, rounds, seconds_of_processor(calls))

    def _on_gpu(self) -> Mapping[str, Way]:
        if min(seconds_on_gpu(self.ways["naive"]) for _ in range(3)) > SHORT_ON_GPU:
            return self.ways
        return {name: as_graph(way) for name, way in self.ways.items()}


def timed_on_ranks(
    ranks: RankPool, build: Callable[..., Case], *arguments: Any, rounds: int, timeout: float = 120.0
) -> tuple[Work, Seconds]:
    """A case that ranks build, check and time; a round takes as long as on the slowest."""
    answers = ranks.run(_timed, build, arguments, rounds, timeout=timeout)
    return answers[0][0], slowest([seconds for _, seconds in answers])


def _timed(build: Callable[..., Case], arguments: Sequence[Any], rounds: int) -> tuple[Work, Seconds]:
    case = build(*arguments)
    return case.work, case.time(rounds)
