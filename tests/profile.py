"""A pytest plugin that says where a run's time goes: `-p tests.profile --profile PAGE` (`make test-profile`).

By folder, by file and by cause: a cause inside another counts for the inner one alone. Processor time is
that of pytest's process and of all below it, ended or alive, such as ranks; collection's is left out.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
import resource
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Generator, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

CAUSES = {  # what is called for each
    "ranks start": ["tests.ranks:_Processes.__init__"],
    "ranks run": ["tests.ranks:_Processes.call"],
    "other processes run": ["subprocess:Popen.communicate", "subprocess:Popen.wait"],
    "kernels are interpreted": ["triton.runtime.interpreter:GridExecutor.__call__"],
    "torch.compile traces and compiles": ["torch._dynamo.convert_frame:ConvertFrame.__call__"],
    "pictures are drawn": ["matplotlib.figure:Figure.savefig"],
}
STARTED = {
    "ranks": "multiprocessing.process:BaseProcess.start",
    "other processes": "subprocess:Popen.__init__",
}
PAGE = "docs/test-profile.md"
COLLECTION, OTHERWISE = "collection, imports", "tests themselves"
TIMES = "tests | seconds | processor seconds"
HEAD = """# Where the time of `make test` goes

For those who make tests faster: written by `make test-profile`; [the tests](testing.md) explain it.
"""
MACHINE = "A loop of three million products took the machine {:.2f} s before the tests, {:.2f} s after.\n"
TICKS = os.sysconf("SC_CLK_TCK")
Took = dict[str, dict[str, float]]


class Stopwatch:
    """What has passed since it was last read."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._started: Counter[str] = Counter()
        self._causes = [COLLECTION]
        self._clock = time.perf_counter()
        self._processor = processor_seconds()

    def collected(self) -> None:
        self._lap()
        self._causes[0] = OTHERWISE
        self._processor = processor_seconds()

    def read(self) -> Took:
        self._lap()
        processor = processor_seconds()
        took: Took = {
            "clock": dict(self._seconds),
            "started": dict(self._started),
            "processor": {"": processor - self._processor},
        }
        self._processor = processor
        self._seconds.clear()
        self._started.clear()
        return took

    def _lap(self) -> None:
        now = time.perf_counter()
        self._seconds[self._causes[-1]] += now - self._clock
        self._clock = now

    def timed(self, function: Callable[..., Any], cause: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._lap()
            self._causes.append(cause)
            try:
                return function(*args, **kwargs)
            finally:
                self._lap()
                self._causes.pop()

        return call

    def counted(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._started[name] += 1
            return function(*args, **kwargs)

        return call


def processor_seconds() -> float:
    """Of this process, of its children that ended, and of all below it that live, with theirs."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    children: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        children[int(fields[1])].append((int(stat.parent.name), sum(map(int, fields[11:15]))))
    ticks, found = 0, [os.getpid()]
    while found:
        for process, its_ticks in children[found.pop()]:
            ticks += its_ticks
            found.append(process)
    return time.process_time() + ended.ru_utime + ended.ru_stime + ticks / TICKS


def loop_seconds() -> float:
    """How fast this machine computes now: shared ones differ by a factor of two within a day."""
    began, total = time.perf_counter(), 0
    for number in range(3_000_000):
        total += number * number
    return time.perf_counter() - began


STOPWATCH = Stopwatch()
BEFORE = pytest.StashKey[float]()


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--profile") is not None and not hasattr(config, "workerinput"):
        config.stash[BEFORE] = loop_seconds()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--profile", type=Path, metavar="PAGE", help="write where the time went, as Markdown")


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Only now: Triton must not be imported before conftest has switched its interpreter on."""
    STOPWATCH.collected()
    for cause, functions in CAUSES.items():
        for function in functions:
            _replace(function, STOPWATCH.timed, cause)
    for name, function in STARTED.items():
        _replace(function, STOPWATCH.counted, name)


def _replace(function: str, wrap: Callable[..., Any], name: str) -> None:
    module, _, path = function.partition(":")
    if find_spec(module.partition(".")[0]) is not None:
        owner_name, _, attribute = path.partition(".")
        owner = getattr(importlib.import_module(module), owner_name)
        setattr(owner, attribute, wrap(getattr(owner, attribute), name))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    if call.when == "teardown":  # travels with the last report of the test, from a worker to whoever prints
        item.user_properties.append(("took", STOPWATCH.read()))
    return (yield)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    page = config.getoption("--profile")
    if page is not None:
        last_reports = [report for report in terminalreporter.getreports("") if report.when == "teardown"]
        page.parent.mkdir(parents=True, exist_ok=True)
        tests = [(report.nodeid, dict(report.user_properties)["took"]) for report in last_reports]
        page.write_text(page_of(tests, config.stash[BEFORE], loop_seconds()))
        terminalreporter.write_line(f"where the time went: {page}")


def page_of(tests: Iterable[tuple[str, Took]], before: float, after: float) -> str:
    """tests: ids, and what each took; before, after: seconds of the loop"""
    clock, started, rows = Counter[str](), Counter[str](), defaultdict[str, list[tuple[float, float]]](list)
    for test, took in tests:
        seconds = sum(took["clock"].values()) - took["clock"].get(COLLECTION, 0.0)
        file = test.partition("::")[0]
        for place in (file.rpartition("/")[0], file):
            rows[place].append((seconds, took["processor"][""]))
        clock.update(took["clock"])
        started.update(took["started"])
    causes = sorted(clock.items(), key=lambda row: -row[1])
    places = [
        (place, len(took), sum(s for s, _ in took), sum(p for _, p in took)) for place, took in rows.items()
    ]
    places.sort(key=lambda row: -row[2])
    return "\n".join(
        [
            HEAD,
            MACHINE.format(before, after),
            _table("cause | seconds, of all workers", causes),
            _table("started | number", sorted(started.items())),
            _table(f"folder | {TIMES}", [row for row in places if not row[0].endswith(".py")]),
            _table(f"slowest files | {TIMES}", [row for row in places if row[0].endswith(".py")][:40]),
        ]
    )


def seconds_of(page: str, files: Collection[str]) -> dict[str, float]:
    """What each file is likely to take: as its row says, or as much as others of its folder without a row."""
    found = re.findall(r"^\| (tests\S*) \| \d+ \| (\d+) ", page, re.MULTILINE)
    rows = {place: float(seconds) for place, seconds in found}
    folders = {file: file.rpartition("/")[0] for file in files}
    left, without = defaultdict(float, rows), Counter[str]()
    for file, folder in folders.items():
        left[folder] -= rows.get(file, 0.0)
        without[folder] += file not in rows
    return {
        file: rows[file] if file in rows else max(0.0, left[folder]) / without[folder]
        for file, folder in folders.items()
    }


def _table(head: str, rows: Iterable[tuple[str | float, ...]]) -> str:
    lines = [head, " | ".join("---" for _ in head.split("|"))]
    for row in rows:
        lines.append(" | ".join(f"{cell:.0f}" if isinstance(cell, float) else str(cell) for cell in row))
    return "".join(f"| {line} |\n" for line in lines)
