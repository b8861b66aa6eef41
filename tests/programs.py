"""Other processes that tests start: Python programs, and forks of a process that has threads.

ended = ran("-m", "tpkernels", "doctor", cwd=folder)
with started("-m", "tpkernels", "train", ...) as program: ...
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.patience import patient

ROOT = Path(__file__).parents[1]
SECONDS = 300.0
# Before 3.11.10 a fork never returns from os.fork() if a thread of torch held a lock of Python's at that
# moment (CPython gh-112275).
FORK_ATTEMPTS = 12 if sys.version_info < (3, 11, 10) else 1
CHILD_SECONDS, BEGIN_SECONDS = 120, 60.0 / FORK_ATTEMPTS


def ran(
    *arguments: object, cwd: Path = ROOT, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENTS` with these environment variables and more, and wait for its end."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=_environment(environment),
        capture_output=True,
        text=True,
        timeout=patient(SECONDS),
        check=False,
    )


@contextmanager
def started(
    *arguments: object, cwd: Path = ROOT, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Start `python ARGUMENTS`; it is killed at the end of the block."""
    command = [sys.executable, *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=cwd, env=_environment(environment), **pipes) as program:  # type: ignore[call-overload]
        try:
            yield program
        finally:
            program.kill()


def _environment(variables: Mapping[str, str] | None) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"PYTHONPATH": path} | dict(variables or {})


def children_of(pid: int) -> list[int]:
    """Return the child processes of a process, in the order in which they were started."""
    return sorted(int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split())


def is_running(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


def await_end_of(pids: Sequence[int]) -> None:
    until(lambda: not any(is_running(pid) for pid in pids))


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + patient(seconds)
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:g} s in vain"
        time.sleep(0.02)


def forked(child: Callable[[], Any], parent: Callable[[], object] = lambda: None) -> Any:
    """Return what `child` returns in a fork, while `parent` runs here."""
    process, reader = _begun(child)
    parent()
    with open(reader, "rb") as answers:
        answer = answers.read()
    os.waitpid(process, 0)
    return pickle.loads(answer)


def _begun(child: Callable[[], Any]) -> tuple[int, int]:
    """Fork, and run `child` there; return its process id and the pipe on which it answers."""
    for _ in range(FORK_ATTEMPTS):
        reader, writer = os.pipe()
        process = os.fork()
        if process == 0:
            signal.alarm(CHILD_SECONDS)
            try:
                os.write(writer, b"!")
                os.write(writer, pickle.dumps(child()))
            finally:
                os._exit(0)
        os.close(writer)
        if select.select([reader], [], [], BEGIN_SECONDS)[0]:
            assert os.read(reader, 1) == b"!", "a fork ended before it began"
            return process, reader
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(reader)
    raise AssertionError(f"no fork of {FORK_ATTEMPTS} began within {BEGIN_SECONDS} s")
