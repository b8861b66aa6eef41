"""Runs tests in forks of one process, which has imported what is slow to import: but nothing of ours.

A program by itself, for it runs in any checkout. Its arguments name modules to import; a line is a request:

    {"tests": [...], "without": [...], "seconds": 180, "hang": 120, "log": "path"}

Its answers: how the tests ended ("passed", "failed", "hung", "crashed"), by which test, and how many ran.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import signal
import sys
import time
from contextlib import suppress
from importlib import import_module
from typing import Any

MOST_MEMORY = 8 * 2**30  # of a process: a loop without an end may not take what others need
BECOME_SUBREAPER = 36  # of prctl: orphans of a run become our children, which we end


class Told:
    """A plugin of pytest that tells through a pipe which test runs, and which has failed."""

    def __init__(self, writer: int, seconds: float) -> None:
        self._writer, self._end = writer, time.monotonic() + seconds
        self._session: Any = None

    def pytest_sessionstart(self, session: Any) -> None:
        self._session = session

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._tell("began", nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self._tell("failed", report.nodeid)
        if time.monotonic() > self._end:
            self._session.shouldstop = "out of time"

    def pytest_collectreport(self, report: Any) -> None:
        self._tell("failed" if report.failed else "collected", report.nodeid)

    def _tell(self, what: str, test: str) -> None:
        os.write(self._writer, f"{what} {test}\n".encode())


def run(tests: list[str], without: list[str], seconds: float, hang: float, log: str) -> dict[str, Any]:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _be_pytest(tests, without, Told(writer, seconds), log)
    os.close(writer)
    count, current, failed, text = 0, "(collecting)", "", b""
    hung = False
    while True:
        if hung := not select.select([reader], [], [], hang)[0]:
            break
        if not (more := os.read(reader, 65536)):
            break
        *lines, text = (text + more).split(b"\n")
        for line in lines:
            what, _, test = line.decode().partition(" ")
            count += what == "began"
            current, failed = test, failed or (test if what == "failed" else "")
        if failed and not select.select([reader], [], [], 20)[0]:
            break  # what it failed by keeps it from leaving
    os.close(reader)
    if hung or failed:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    _end_orphans()
    if failed:
        return {"ended": "failed", "by": failed, "tests": count}
    if hung:
        return {"ended": "hung", "by": current, "tests": count}
    if os.waitstatus_to_exitcode(status) in (0, 2, 5):  # 2: out of time, 5: all tests were deselected
        return {"ended": "passed", "by": "", "tests": count}
    return {"ended": "crashed", "by": current, "tests": count}


def _be_pytest(tests: list[str], without: list[str], told: Told, log: str) -> None:
    import pytest

    os.setpgid(0, 0)
    nothing, file = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for source, number in ((nothing, 0), (file, 1), (file, 2)):
        os.dup2(source, number)
    deselected = [f"--deselect={test}" for test in without]
    plain = ["-x", "-q", "--tb=short", "-p", "no:cacheprovider", "-p", "no:xdist"]
    os._exit(pytest.main([*plain, *deselected, *tests], plugins=[told]))


def _end_orphans() -> None:
    """Ranks and other processes that outlive the tests that started them."""
    while True:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            orphans = [int(pid) for pid in file.read().split()]
        if not orphans:
            return
        for pid in orphans:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def main() -> None:
    sys.path[0] = os.getcwd()  # the checkout, not the folder of this program
    ctypes.CDLL(None).prctl(BECOME_SUBREAPER, 1, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_MEMORY, MOST_MEMORY))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in sys.argv[1:]:
        with suppress(ImportError):
            import_module(name)
        if name == "torch" and not sys.modules["torch"].cuda.is_available():
            os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported; as in tests/conftest.py
    assert not {"tpkernels", "tests", "bench"} & sys.modules.keys(), "a fault would not be seen"
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        print(json.dumps(run(**json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
