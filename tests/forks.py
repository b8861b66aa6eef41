"""Forks of a process that has threads: ranks have torch's."""

import os
import pickle
import select
import signal
import sys
from collections.abc import Callable
from typing import Any

CHILD_SECONDS = 20
BEGIN_SECONDS = 5.0
# Before 3.11.10 a fork never comes back from os.fork() if a thread of torch held a lock of Python's at that
# moment, as it does for an instant when it lets go of a tensor (CPython gh-112275). Nothing of ours ran.
ATTEMPTS = 4 if sys.version_info < (3, 11, 10) else 1


def forked(child: Callable[[], Any], parent: Callable[[], object] = lambda: None) -> Any:
    """What `child` returns in a fork, while `parent` runs here."""
    process, reader = _begun(child)
    parent()
    with open(reader, "rb") as answers:
        answer = answers.read()
    os.waitpid(process, 0)
    return pickle.loads(answer)


def _begun(child: Callable[[], Any]) -> tuple[int, int]:
    """A fork in which `child` runs: its number, and where its answer can be read."""
    for _ in range(ATTEMPTS):
        reader, writer = os.pipe()
        process = os.fork()
        if process == 0:  # answers through the pipe and leaves at once, whatever happens
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
    raise AssertionError(f"no fork of {ATTEMPTS} began within {BEGIN_SECONDS} s")
