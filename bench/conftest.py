"""Fixtures by which benchmarks hand over their times, and the summary at the end."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from bench.case import Case, Measured, measured_on_ranks
from bench.counts import Counts
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
COUNTED = pytest.StashKey[dict[str, Counts]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seconds", type=float, metavar="N", help="begin no benchmark after so many seconds")
    parser.addoption("--outcomes", type=Path, metavar="FILE", help="write counts and failures, as JSON")
    parser.addoption("--count", action="store_true", help="count what ours does, and time it in few rounds")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[BEGAN], config.stash[COUNTED] = time.monotonic(), {}


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


class Bench:
    """Measures a test's case, and hands over what was found."""

    def __init__(self, benchmark: BenchmarkFixture, past: PastRounds, item: pytest.Item) -> None:
        self._benchmark, self._past, self._item = benchmark, past, item
        self.counted = bool(item.config.getoption("--count"))

    def case(self, case: Case, rounds: int) -> None:
        """Measure a case of this process."""
        self.record(case.measured(rounds, counted=self.counted))

    def on_ranks(
        self, ranks: RankPool, build: Callable[..., Case], *given: Any, rounds: int, timeout: float = 120.0
    ) -> Measured:
        """Measure a case that ranks build."""
        counted = self.counted
        return measured_on_ranks(ranks, build, *given, rounds=rounds, timeout=timeout, counted=counted)

    def record(self, measured: Measured) -> None:
        work, seconds, counts = measured
        self._benchmark.group = f"{work.op} {work.shape}"
        self._benchmark.extra_info |= extra_info(work, seconds)
        self._item.config.stash.setdefault(INFOS, []).append(self._benchmark.extra_info)
        if counts is not None:
            self._item.config.stash[COUNTED][self._item.nodeid] = counts
        self._past.hand_over(self._benchmark, seconds["ours"])


@pytest.fixture
def bench(past: PastRounds, benchmark: BenchmarkFixture, request: pytest.FixtureRequest) -> Bench:
    return Bench(benchmark, past, request.node)


@pytest.fixture
def counted(request: pytest.FixtureRequest) -> Callable[[Counts], None]:
    """Call it with the counts of a test that times nothing."""
    if not request.config.getoption("--count"):
        pytest.skip("it times nothing; --count counts it")
    return partial(request.config.stash[COUNTED].__setitem__, request.node.nodeid)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if infos := config.stash.get(INFOS, []):
        terminalreporter.section("how many times faster than the naive way")
        for line in summary(infos):
            terminalreporter.line(line)
    if path := config.getoption("--outcomes"):
        stats = {outcome: terminalreporter.stats.get(outcome, []) for outcome in OUTCOMES}
        failures = {r.nodeid: str(r.longrepr)[-2000:] for r in stats["failed"] + stats["error"]}
        totals = {outcome: len(reports) for outcome, reports in stats.items()}
        told = {"totals": totals, "failures": failures, "counted": config.stash[COUNTED]}
        path.write_text(json.dumps(told), encoding="utf-8")


@pytest.fixture(scope="session")
def ranks2() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool
