"""Child processes that run the code of users: a crash fails the item that caused it, and nothing else.

A program of this folder calls `serve`, and `answers` starts it. Items go there as JSON; answers come back as
lines of JSON, in the order of the items.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tpkernels.child import end_with_parent, ending, started
from tpkernels.gate.user_kernels.record import ConfigError

LIMIT = 300  # seconds for an item

ItemOfChild = Mapping[str, Any]
Answer = dict[str, Any]


def answers(
    program: str, folder: Path, items: Sequence[ItemOfChild], variables: dict[str, str] | None = None
) -> Iterator[Answer | str]:
    """The answer to each item, or in words how the process ended over it; what is left goes to a new one."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", program, str(folder)]
    todo = list(items)
    while todo:
        with started(command, json.dumps(todo), environment | (variables or {})) as child:
            for line in child.lines_until_end():
                todo.pop(0)
                yield json.loads(line)
            if todo:
                todo.pop(0)
                yield _ending(child.end() or 0, child.last_words())


def serve(work: Callable[[ItemOfChild], Answer]) -> None:
    """Answer each item that `answers` sent; a ConfigError is an answer, too."""
    end_with_parent()
    folder = sys.argv[1]
    items = json.load(sys.stdin)
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever others print does not come between our lines
    sys.path.insert(0, folder)
    for item in items:
        signal.alarm(LIMIT)  # ends the process, also where Python does not get a turn
        try:
            answer = work(item)
        except ConfigError as mistake:
            answer = {"mistake": str(mistake)}
        signal.alarm(0)
        print(json.dumps(answer), file=lines, flush=True)


def said(error: BaseException) -> str:
    """In one line: the first cause, and its last words."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__


def _ending(code: int, last_words: str) -> str:
    if code == -signal.SIGALRM:
        return f"took longer than {LIMIT} s"
    return f"ended its process {ending(code)}{': ' * bool(last_words)}{last_words}"
