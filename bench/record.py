"""What a benchmark's result says: the same keys for every case. `docs/benchmarks.md` explains them."""

from __future__ import annotations

import statistics
import subprocess
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from pytest_benchmark.fixture import BenchmarkFixture

from bench.case import Work
from bench.measure import Comparison, Seconds
from bench.shapes import this_gpu

ROOT = Path(__file__).parents[1]
KEYS = (
    "op",
    "shape",
    "pass",
    "naive",
    "ratio",
    "ratio_quartile_low",
    "ratio_quartile_high",
    "rounds",
    "ours_ms",
    "naive_ms",
    "least_ratio",
    "roofline",
    "bytes",
    "wire_bytes",
    "flops",
    "backend",
    "world",
    "dtype",
    "device",
    "versions",
    "revision",
)  # and ratio_to_NAME of each further way


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


def extra_info(work: Work, seconds: Seconds) -> dict[str, Any]:
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


def milliseconds(seconds: list[float]) -> float:
    return round(1e3 * statistics.median(seconds), 6)


def roofline(work: Work, best: float) -> float | None:
    gpu = this_gpu() if work.device == "cuda" else None
    if gpu is None or work.flops is None or work.bytes is None:
        return None
    return round(gpu.floor(work.flops, work.bytes) / best, 4)


@cache
def versions() -> dict[str, str | None]:
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = None
    found = {"python": sys.version.split()[0], "torch": torch.__version__, "triton": triton}
    return found | {"cuda": torch.version.cuda if torch.cuda.is_available() else None}


@cache
def revision() -> str | None:
    """The commit, with + after it where files differ from it."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except OSError:  # no git
        return None
    return ran.stdout.strip() or None
