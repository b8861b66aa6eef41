"""What a benchmark's result says: the same keys for every case. `docs/benchmarks.md` explains them.

Also as lines of text, by op and shape.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from itertools import cycle, groupby

import torch
from pytest_benchmark.fixture import BenchmarkFixture

from bench.case import Work
from bench.device import revision, versions
from bench.measure import Comparison, Seconds
from bench.results import Info, duration
from bench.shapes import this_gpu


class PastRounds:
    """A clock for pytest-benchmark, which passes as rounds did that were timed before, here or on ranks."""

    def __init__(self) -> None:
        self._now = 0.0

    def read(self) -> float:
        return self._now

    def hand_over(self, benchmark: BenchmarkFixture, seconds: list[float]) -> None:
        rounds = cycle(seconds)

        def pass_() -> None:
            self._now += next(rounds)

        benchmark.pedantic(pass_, rounds=len(seconds))  # type: ignore[no-untyped-call]


def extra_info(work: Work, seconds: Seconds) -> Info:
    """Return what is said of a case; of each further way its ratio_to_NAME."""
    against_naive = Comparison(seconds["ours"], seconds["naive"])
    low, high = against_naive.quartiles
    info = {
        "op": work.op,
        "shape": work.shape,
        "pass": work.pass_,
        "naive": work.naive,
        "ratio": round(against_naive.ratio, 4),
        "ratio_quartile_low": round(low, 4),
        "ratio_quartile_high": round(high, 4),
        "rounds": len(seconds["ours"]),
        "ours_ms": milliseconds(seconds["ours"]),
        "naive_ms": milliseconds(seconds["naive"]),
        "least_ratio": work.least_ratio,
        "roofline": roofline(work, min(seconds["ours"])),
        "bytes": work.bytes,
        "wire_bytes": work.wire_bytes,
        "flops": work.flops,
        # a choice on a GPU only
        "backend": "torch" if work.backend == "auto" and work.device == "cpu" else work.backend,
        "world": work.world,
        "dtype": str(work.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name() if work.device == "cuda" else "cpu",
        "versions": versions(),
        "revision": revision(),
    }
    for name in sorted(seconds.keys() - {"ours", "naive"}):
        info[f"ratio_to_{name}"] = round(Comparison(seconds["ours"], seconds[name]).ratio, 4)
    return info


def summary(infos: Sequence[Info]) -> Iterator[str]:
    """infos: the results of each case, in the order in which they ran"""

    def heading(info: Info) -> tuple[str, str]:
        return info["op"], info["shape"]

    for (op, shape), group in groupby(sorted(infos, key=heading), heading):
        yield f"{op} {shape}"
        for info in group:
            spread = f"{info['ratio_quartile_low']:.2f} to {info['ratio_quartile_high']:.2f}"
            times = f"{duration(info['ours_ms'])} against {duration(info['naive_ms'])} of {info['naive']}"
            others = [key for key in info if key.startswith("ratio_to_")]
            more = "".join(f", {info[key]:.2f}x {key.removeprefix('ratio_to_')}" for key in others)
            yield f"  {info['pass']:<17} {info['ratio']:6.2f}x ({spread})  {times}{more}"


def milliseconds(seconds: list[float]) -> float:
    return round(1e3 * statistics.median(seconds), 6)


def roofline(work: Work, best: float) -> float | None:
    gpu = this_gpu() if work.device == "cuda" else None
    if gpu is None or work.flops is None or work.bytes is None:
        return None
    return round(gpu.floor(work.flops, work.bytes) / best, 4)
