"""Fixtures by which benchmarks hand over their times, and the summary at the end."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from bench.case import Work
from bench.measure import Seconds
from bench.record import PastRounds, extra_info, summary
from bench.results import Info
from tests.ranks import RankPool

torch.set_num_threads(1)  # ranks share the cores, and two cores are noisier than one

# Freed memory stays with a process, else a call of 2 ms pays for clearing up to 1,000 pages, or for none, by
# how the heap happens to lie. Ranks read the variables when they start.
os.environ |= {"MALLOC_TRIM_THRESHOLD_": str(2**30), "MALLOC_MMAP_THRESHOLD_": str(2**25)}
if sys.platform == "linux":
    for parameter, size in ((-1, 2**30), (-3, 2**25)):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
        getattr(ctypes.CDLL(None), "mallopt", lambda *_: 0)(parameter, size)

OUTCOMES = ("passed", "failed", "error", "skipped")
BEGAN = pytest.StashKey[float]()
INFOS = pytest.StashKey[list[Info]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seconds", type=float, metavar="N", help="begin no benchmark after so many seconds")
    parser.addoption("--outcomes", type=Path, metavar="FILE", help="write counts and failures, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[BEGAN] = time.monotonic()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """What was timed until then is kept, where a limit from outside would lose it."""
    seconds = item.config.getoption("--seconds")
    if seconds is not None and time.monotonic() - item.config.stash[BEGAN] > seconds:
        pytest.skip(f"{seconds:g} seconds are over")


@pytest.fixture
def past(request: pytest.FixtureRequest) -> PastRounds:
    """Stands before `benchmark`, which asks for its clock when it is made."""
    clock = PastRounds()
    request.node.add_marker(pytest.mark.benchmark(timer=clock.read))
    return clock


@pytest.fixture
def record(
    past: PastRounds, benchmark: BenchmarkFixture, pytestconfig: pytest.Config
) -> Callable[[Work, Seconds], None]:
    """Call it with a case's work and the seconds of its ways."""

    def record(work: Work, seconds: Seconds) -> None:
        benchmark.group = f"{work.op} {work.shape}"
        benchmark.extra_info |= extra_info(work, seconds)
        pytestconfig.stash.setdefault(INFOS, []).append(benchmark.extra_info)
        past.hand_over(benchmark, seconds["ours"])

    return record


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if infos := config.stash.get(INFOS, []):
        terminalreporter.section("how many times faster than the naive way")
        for line in summary(infos):
            terminalreporter.line(line)
    if path := config.getoption("--outcomes"):
        stats = {outcome: terminalreporter.stats.get(outcome, []) for outcome in OUTCOMES}
        failures = {r.nodeid: str(r.longrepr)[-2000:] for r in stats["failed"] + stats["error"]}
        counts = {outcome: len(reports) for outcome, reports in stats.items()}
        path.write_text(json.dumps({"counts": counts, "failures": failures}), encoding="utf-8")


@pytest.fixture(scope="session")
def ranks2() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool
