"""Child processes that run the code of users: a crash fails the item that caused it, and nothing else.

A program of this folder calls `serve`, and `answers` starts it. Items go there as JSON; answers come back as
lines of JSON, in the order of the items. `python -m tpkernels.gate.user_kernels.children` is such a program:
it imports a kernel, or a module, and says what arguments the kernel has, or which kernels are registered.
"""

from __future__ import annotations

import inspect
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from tpkernels.gate.child import end_with_parent, ending, one_line_error, started
from tpkernels.gate.user_kernels.entries import Inspected
from tpkernels.gate.user_kernels.memory import Memory, imported_files
from tpkernels.gate.user_kernels.record import ConfigError
from tpkernels.gate.user_kernels.recorded import RECORDED
from tpkernels.gate.user_kernels.table import registered

LIMIT = 300  # seconds for an item

ItemOfChild = Mapping[str, Any]
Answer = dict[str, Any]


def answers(
    program: str, folder: Path | None, items: Sequence[ItemOfChild], variables: dict[str, str] | None = None
) -> Iterator[Answer | str]:
    """The answer to each item, or in words how the process ended over it; what is left goes to a new one.

    Of a user's folder answers are kept in the user's cache for as long as the files of all modules that were
    imported for them stay the same: then no process starts.
    """
    memory = Memory(program, folder, variables or {}) if folder else None
    known = [memory.of(item) if memory else None for item in items]
    todo = [item for item, answer in zip(items, known, strict=True) if answer is None]
    anew = _answers(program, folder, todo, variables)
    for item, answer in zip(items, known, strict=True):
        if answer is None:
            fresh = next(anew)
            if memory and isinstance(fresh, dict) and "mistake" not in fresh:
                fresh = memory.keep(item, fresh.pop("files"), fresh)
            yield fresh
        else:
            yield answer


def _answers(
    program: str, folder: Path | None, items: Sequence[ItemOfChild], variables: dict[str, str] | None = None
) -> Iterator[Answer | str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", program, str(folder or "")]
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
    if folder:
        sys.path.insert(0, folder)
    for item in items:
        signal.alarm(LIMIT)  # ends the process, also where Python does not get a turn
        try:
            answer = work(item)
        except ConfigError as mistake:
            answer = {"mistake": str(mistake)}
        signal.alarm(0)
        files = imported_files() + answer.get("files", []) if folder else []
        print(json.dumps({**answer, "files": files}), file=lines, flush=True)


def _ending(code: int, last_words: str) -> str:
    if code == -signal.SIGALRM:
        return f"took longer than {LIMIT} s"
    return f"ended its process {ending(code)}{': ' * bool(last_words)}{last_words}"


def imported(name: str) -> ModuleType:
    """A module; of a user's it seems that there is a GPU, as where it will run."""
    if name in sys.modules or name.startswith("tpkernels."):
        return import_module(name)
    from tpkernels.gate.user_kernels.pretended_gpu import pretended_gpu

    with pretended_gpu():
        return import_module(name)


def imported_attribute(key: str, place: str) -> Any:
    """What "module:name" stands for, imported; ConfigError says why there is none."""
    name, attribute = place.split(":")
    try:
        module = imported(name)
    except BaseException as error:  # SystemExit, too: it is about this module
        raise ConfigError(key, f"importing {name!r}: {one_line_error(error)}") from error
    if not hasattr(module, attribute):
        raise ConfigError(key, f"module {name!r} ({module.__file__}) has no {attribute!r}")
    return getattr(module, attribute)


def answered(item: ItemOfChild) -> Answer:
    """item: a "module", or "kernel" and "oracle" of a table"""
    return _registered(item["module"]) if "module" in item else _inspected(item)


def _registered(module: str) -> Answer:
    try:
        imported(module)
    except BaseException as error:
        raise ConfigError("importing it", one_line_error(error)) from error
    return {"kernels": {own.name: own.as_table() for own in registered()}}


def _inspected(item: ItemOfChild) -> Answer:
    from triton.runtime.jit import JITFunction

    from tpkernels.gate.ahead_of_time import undecorated

    kernel = undecorated(imported_attribute("kernel", item["kernel"]))
    if not isinstance(kernel, JITFunction):
        raise ConfigError(
            "kernel", f"expected a function under triton.jit, {item['kernel']} is {_kind(kernel)}"
        )
    if kernel.is_gluon():
        raise ConfigError("kernel", f"{item['kernel']} is written in Gluon, which is not checked")
    place = item["oracle"]
    if place not in (None, RECORDED) and not callable(function := imported_attribute("oracle", place)):
        raise ConfigError("oracle", f"expected a function, {place} is {_kind(function)}")
    return asdict(Inspected.of(kernel, item.get("folder", "")))


def _kind(thing: Any) -> str:
    return f"a {type(thing).__name__}" if not inspect.isclass(thing) else "a class"


if __name__ == "__main__":
    serve(answered)
