"""Programs in processes that have imported torch already: forks, where a new interpreter needs seconds.

`with started("-m", "tpkernels", "train", ...) as program` and `ran(...)` stand for subprocess.Popen and run.
Processes and signals are real; what a program starts with `sys.executable` is forked in turn.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib
import inspect
import multiprocessing
import os
import pickle
import runpy
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

from tests.patience import patient
from tests.ranks import FORKED  # whose server has torch and the package imported

SECONDS = 120.0
CHANNELS = {"p2cread": 0, "c2pwrite": 1, "errwrite": 2}  # subprocess's names for a child's ends
_begin = subprocess.Popen._execute_child  # type: ignore[attr-defined]


class Program:
    """One that runs, seen from outside. What it writes lies in files, so that it never waits for a reader."""

    def __init__(self, process: BaseProcess, folder: Path) -> None:
        self._process, self._folder = process, folder
        self._last_words: dict[str, str] = {}
        self.pid = process.pid or 0
        self.kill, self.terminate = process.kill, process.terminate

    @property
    def stdout(self) -> str:
        return self._read("stdout")

    @property
    def stderr(self) -> str:
        return self._read("stderr")

    def _read(self, name: str) -> str:
        path = self._folder / name
        return path.read_text(errors="replace") if path.exists() else self._last_words.get(name, "")

    def end(self) -> None:
        self.kill()
        self._process.join()
        self._last_words = {name: self._read(name) for name in ("stdout", "stderr")}

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def wait(self, seconds: float = SECONDS) -> int:
        """Its exit code, or the stacks of a program that hangs."""
        self._process.join(patient(seconds))
        if self._process.exitcode is None:
            for pid in [*children_of(self.pid), self.pid]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR1)
            time.sleep(1.0)  # stacks are written
            raise AssertionError(
                f"a program did not end in {patient(seconds):.0f} s: {self.stdout}{self.stderr}"
            )
        return self._process.exitcode

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + patient(SECONDS)
        while not condition():
            assert time.monotonic() < deadline, f"waited in vain: {self.stdout}{self.stderr}"
            assert self._process.is_alive(), self.stdout + self.stderr
            time.sleep(0.02)


@contextmanager
def started(
    *arguments: object,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    planted: Callable[[], None] | None = None,
) -> Iterator[Program]:
    """`python ARGUMENTS`, in this environment and more; ended with the block.

    planted: called first in every process, as sitecustomize is; importable by name
    """
    with TemporaryDirectory() as folder:
        words = [str(argument) for argument in arguments]
        given = (words, folder, cwd or Path.cwd(), {**os.environ, **(environment or {})}, planted)
        process = multiprocessing.get_context(FORKED).Process(target=_first, args=given)
        process.start()
        program = Program(process, Path(folder))
        try:
            yield program
        finally:
            program.end()


def ran(*arguments: object, **how: Any) -> subprocess.CompletedProcess[str]:
    """What came of a program once it has ended; `how`: see `started`."""
    with started(*arguments, **how) as program:
        code = program.wait()
    return subprocess.CompletedProcess(arguments, code, program.stdout, program.stderr)


def called(function: Callable[..., Any], *arguments: Any, **how: Any) -> Any:
    """What a function, importable by name, returns in such a process: what it starts is forked, too."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "answer")
        path.write_bytes(pickle.dumps((function, arguments)))
        answered = ran("-m", "tests.warm_call", path, **how)
        assert answered.returncode == 0, answered.stderr
        return pickle.loads(path.read_bytes())


def children_of(pid: int) -> list[int]:
    """In the order in which they were started."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return sorted(int(child) for child in found)


def await_end_of(pids: Sequence[int]) -> None:
    deadline = time.monotonic() + patient(60)
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline, "processes live on"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"  # may be reaped late
    except FileNotFoundError:
        return False


def _first(
    words: list[str], folder: str, cwd: Path, environment: dict[str, str], planted: Callable[[], None] | None
) -> None:
    for number, name in enumerate(("stdout", "stderr"), start=1):
        opened = os.open(Path(folder, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, number)
        os.close(opened)
    fork_pythons()
    _Planted.fault = planted
    _become(words, cwd, environment)


def fork_pythons() -> None:
    """From now on another Python that this process starts is a fork of it."""
    subprocess.Popen._execute_child = _execute_child  # type: ignore[attr-defined]


class _Planted:
    """Of this process, and of those that it starts."""

    fault: Callable[[], None] | None = None


def _execute_child(popen: subprocess.Popen[Any], *arguments: Any) -> None:
    """In the place of subprocess's own: another Python begins as a fork of this one."""
    given = inspect.signature(_begin).bind(popen, *arguments).arguments
    command, environment = given["args"], os.environ if given["env"] is None else given["env"]
    is_python = not isinstance(command, str | bytes | os.PathLike) and command[0] == sys.executable
    if given["shell"] or not is_python or environment.get("PYTHONPATH") != os.environ.get("PYTHONPATH"):
        _begin(popen, *arguments)
        return
    for stream in (sys.stdout, sys.__stdout__, sys.__stderr__):
        stream.flush()  # type: ignore[union-attr]
    pid = os.fork()
    if pid == 0:
        try:
            for name, number in CHANNELS.items():
                if given[name] != -1:
                    os.dup2(given[name], number)
            _close_all_but(given["pass_fds"])
            if given["start_new_session"]:
                os.setsid()
            _become([str(word) for word in command[1:]], given["cwd"], given["env"])
        finally:
            os._exit(1)
    popen.pid, popen._child_created = pid, True  # type: ignore[attr-defined]
    popen._close_pipe_fds(*(given[name] for name in PIPES))  # type: ignore[attr-defined]


PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


def _close_all_but(kept: Sequence[int]) -> None:
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2 and descriptor not in kept:
            with suppress(OSError):
                os.close(descriptor)


def _become(words: Sequence[str], cwd: Path | str | None, environment: Mapping[str, str] | None) -> NoReturn:
    """Be a new Python that was given these words, to the end of the process."""
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0, closefd=False), sys.__stdout__, sys.__stderr__
    gc.freeze()  # what it was forked with: `parallelize` looks at all objects
    weakref.finalize._registry.clear()  # type: ignore[attr-defined] # folders of whom we were forked from
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.register(signal.SIGUSR1, chain=True)
    if cwd is not None:
        os.chdir(cwd)
    interpreted = os.environ.get("TRITON_INTERPRET")
    if environment is not None:
        os.environ.clear()
        os.environ.update(environment)
    if os.environ.get("TRITON_INTERPRET") != interpreted:
        _forget("tpkernels", "bench", "triton")
    elif any(name.startswith("TPKERNELS_") for name in os.environ):
        _forget("tpkernels", "bench")
    code = 1
    try:
        code = _code_of(words)
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _forget(*packages: str) -> None:
    """To be imported again, by other variables. Not the extensions, which a process cannot load twice."""
    for name in list(sys.modules):
        if name.partition(".")[0] in packages and not name.startswith(("tpkernels._C", "triton._C")):
            del sys.modules[name]
    if (fault := _Planted.fault) is not None:  # into the package that is imported anew
        sys.modules.pop(fault.__module__, None)
        _Planted.fault = getattr(importlib.import_module(fault.__module__), fault.__name__)


def _code_of(words: Sequence[str]) -> int:
    try:
        if _Planted.fault is not None:
            _Planted.fault()
        _execute([word for word in words if word != "-u"])
    except SystemExit as exit_:
        if isinstance(exit_.code, str):
            print(exit_.code, file=sys.stderr)
        return exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _execute(words: Sequence[str]) -> None:
    first, *rest = words
    if first == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(rest[0], {"__name__": "__main__"})
    elif first == "-m":
        sys.argv = [rest[0], *rest[1:]]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *rest]
        sys.path.insert(0, str(Path(first).parent))
        runpy.run_path(first, run_name="__main__")
