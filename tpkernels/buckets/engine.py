"""The Python interface of the C++ engine of gradient buckets (csrc/bucket_engine.cpp).

Builds the C++ extension at its first use if the install did not: once for all ranks of a machine.

The rank that takes the lock first builds in a temporary folder and moves the finished library to its place;
the other ranks wait for the lock and find the library. The operating system frees the lock when a builder
dies, and the next rank builds. If a build fails, all ranks that waited for it raise the same error.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from tempfile import mkdtemp
from typing import Protocol, TextIO

import torch
from torch import Tensor

from tpkernels.comm.carveout import blocks_of
from tpkernels.comm.groups import LiveGroup
from tpkernels.comm.supported import FLOATING, Problem
from tpkernels.extension import ExtensionState, extension, library_of_first_use, sources

BUILD_SECONDS = 600.0  # time limit of a build
WAIT_SECONDS = BUILD_SECONDS + 60.0  # time limit of the wait for another rank's build
INSTEAD = "until then use torch.nn.parallel.DistributedDataParallel"
# Runs in its own process, which can be killed. Loading the library is its last step.
_BUILD = """
import sys
from torch.utils.cpp_extension import load
source, flags, folder = sys.argv[1:]
load("tpkernels_C", [source], flags.split(), build_directory=folder, is_python_module=False)
"""


class CannotBuild(Exception):
    """The extension cannot be built here; the message has the reason and the remedy."""


def problem_with_extension() -> Problem | None:
    """Load the extension, and build it first if needed; return why it cannot be used, or None."""
    if extension().state is ExtensionState.ABSENT:
        try:
            build(library_of_first_use())
        except CannotBuild as error:
            return (
                "ImportError",
                f"the C++ extension is not built, and cannot be built here: {error}; {INSTEAD}",
            )
        extension.cache_clear()
    found = extension()
    if found.state is not ExtensionState.LOADED:
        return "ImportError", f"tpkernels' C++ extension is unusable: {found.detail}"
    return None


def build(library: Path | None) -> None:
    """Build `library`, or wait for the process that is building it."""
    if library is None:
        raise CannotBuild("there is no folder for it; set TPKERNELS_CACHE_DIR to one that can be written")
    environment = _with_tools()
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        _build_alone(library, environment)
    except OSError as error:
        raise CannotBuild(f"{error}; set TPKERNELS_CACHE_DIR to a folder that can be written") from error


def _build_alone(library: Path, environment: dict[str, str]) -> None:
    failure = library.with_name("failure.txt")
    before = _identity(failure)
    with _locked(library.with_name("lock")):
        if library.exists():
            return
        if _identity(failure) != before:  # the build that this rank waited for has failed
            raise CannotBuild(_reason(failure))
        for abandoned in library.parent.glob("building-*"):  # by builders that died
            shutil.rmtree(abandoned, ignore_errors=True)
        print(
            f"tpkernels: building the C++ extension once, into {library.parent}",
            file=sys.stderr,
            flush=True,
        )
        folder = Path(mkdtemp(prefix="building-", dir=library.parent))
        try:
            _compile(folder, environment)
            os.replace(folder / library.name, library)
        except CannotBuild:
            os.replace(folder / "log.txt", failure)
            raise CannotBuild(_reason(failure)) from None
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _with_tools() -> dict[str, str]:
    """Return the environment for a build; its PATH includes the scripts folder of this Python, for ninja."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), sysconfig.get_path("scripts")])
    compiler = os.environ.get("CXX", "c++")  # as torch chooses
    if not shutil.which((shlex.split(compiler) or [""])[0], path=path):
        raise CannotBuild(
            f"there is no C++ compiler: '{compiler}' is not on the PATH; install one for C++20 (apt install "
            "g++, say), or name one in CXX"
        )
    if not shutil.which("ninja", path=path):
        raise CannotBuild("ninja is not on the PATH; install it: pip install ninja")
    return os.environ | {"PATH": path}


def _compile(folder: Path, environment: dict[str, str]) -> None:
    """Compile tpkernels_C.so into `folder`, and write the compiler's output to its log.txt."""
    flags = (sources() / "cxx_flags").read_text()
    command = [sys.executable, "-c", _BUILD, str(sources() / "all.cpp"), flags, str(folder)]
    with (folder / "log.txt").open("w") as log:
        # its own file and session: no compiler outlives the time limit, or keeps a pipe open
        builder = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            failed = builder.wait(BUILD_SECONDS) != 0
        except subprocess.TimeoutExpired:
            failed = True
            log.write(f"\nerror: it took longer than {BUILD_SECONDS:.0f} s\n")
        finally:
            if builder.poll() is None:
                os.killpg(builder.pid, signal.SIGKILL)
                builder.wait()
    if failed:
        raise CannotBuild


def _reason(failure: Path) -> str:
    """Return the compiler's first error, or the last line of its output."""
    lines = failure.read_text(errors="replace").strip().splitlines() or ["no reason was given"]
    first = next((line for line in lines if "error:" in line), lines[-1])
    return f"{first.strip()} (the full output is in {failure})"


def _identity(file: Path) -> tuple[int, int] | None:
    """Return a value that changes whenever the file is replaced; not its age: machines' clocks differ."""
    try:
        found = file.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


@contextmanager
def _locked(path: Path) -> Iterator[TextIO]:
    """Hold an exclusive lock on `path` over processes, or raise after `WAIT_SECONDS`."""
    deadline = time.monotonic() + WAIT_SECONDS
    with path.open("a") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise CannotBuild(
                        f"another process has held {path} for {WAIT_SECONDS:.0f} s; if it hangs, end it"
                    ) from None
                time.sleep(0.1)
        yield lock


LONGEST_TIMEOUT = timedelta(days=365)  # clocks count nanoseconds, and overflow in 292 years


@dataclass(frozen=True)
class EngineOptions:
    """Options of an engine, fixed at construction."""

    group: LiveGroup
    tensor_parallel_group: LiveGroup | None  # where gradients of marked parameters are summed first
    rank: int  # of this process in the world, for messages
    reduce_scatter: bool  # else all-reduce
    average: bool  # over `group`; else sum
    main_grad: bool  # gradients are accumulated in `main_grad`; `grad` stays None
    check_nan: bool
    grad_dtype: torch.dtype | None  # of buckets; the parameters' own if None
    wire_dtype: torch.dtype | None  # of sent data; if None the buckets' own, or wider
    timeout: timedelta | None  # of a collective; the group's own if None

    def shown_tensor_parallel_group(self) -> str:
        group = self.tensor_parallel_group
        return "None" if group is None else f"of {group.size} ranks"


class Engine(Protocol):
    """Accumulates gradients in flat buckets and reduces them during backward.

    csrc/bucket_engine.h documents each method. Parameters are numbered by their position.
    """

    def arrange(self, bucket_of: list[int], offset_of: list[int], buckets: list[Tensor], /) -> None: ...
    def meet(
        self,
        tensor_parallel: bool,
        members: list[int],
        doorbells: list[Tensor],
        words: list[Tensor],
        flats: list[Tensor],
        across: str,
        owners: list[int],
        timeout_ms: int,
        /,
    ) -> None: ...
    def interrupt(self) -> bool: ...
    def launch_rest(self) -> bool: ...
    def settle(self, seconds: float, /) -> bool: ...
    def awaited(self) -> tuple[str, bool, list[int], list[int]]: ...
    def lose_others(self) -> None: ...
    def expect(self, arrivals: list[int], /) -> None: ...
    def zero(self) -> bool: ...
    def finish(self) -> list[int]: ...
    def is_midway(self) -> bool: ...
    def set_synchronizing(self, synchronizing: bool, /) -> None: ...
    def detach(self) -> None: ...
    def buckets(self) -> list[Tensor]: ...
    def views(self) -> list[Tensor]: ...
    def arrivals(self) -> list[int]: ...
    def last_arrivals(self) -> list[int]: ...
    def launched_in_backward(self) -> int: ...


def make_engine(
    parameters: Sequence[Tensor], names: Sequence[str], marked: Sequence[bool], options: EngineOptions
) -> Engine:
    """Make an engine and register its hooks on `parameters`.

    marked: for each parameter, whether its gradient is summed over the tensor-parallel group as well
    """
    tensor_parallel_group, timeout = options.tensor_parallel_group, options.timeout
    engine: Engine = torch.classes.tpkernels.BucketEngine(
        list(parameters),
        list(names),
        list(marked),
        options.group.name,
        "" if tensor_parallel_group is None else tensor_parallel_group.name,
        options.rank,
        options.reduce_scatter,
        options.average,
        options.main_grad,
        options.check_nan,
        options.grad_dtype,
        options.wire_dtype,
        -1 if timeout is None else max(1, round(timeout.total_seconds() * 1000)),
        blocks_of(options.group.get(), parameters[0].device),
    )
    return engine


def problem_of_options(
    bucket_bytes: object, reduce: str, grad_dtype: object, wire_dtype: object, timeout: object
) -> Problem | None:
    """Return why options of `GradientBuckets` are refused; None if they are valid."""
    if not isinstance(bucket_bytes, int) or bucket_bytes < 1:
        return "ValueError", f"bucket_bytes: expected a whole number of at least 1, got {bucket_bytes!r}"
    if timeout is not None and not isinstance(timeout, timedelta):
        return "TypeError", f"timeout: expected a datetime.timedelta, got {timeout!r}"
    if timeout is not None and not timedelta(0) < timeout < LONGEST_TIMEOUT:
        return "ValueError", f"timeout: expected more than zero and less than a year, got {timeout}"
    if reduce not in ("all_reduce", "reduce_scatter"):
        return "ValueError", f"reduce: expected 'all_reduce' or 'reduce_scatter', got {reduce!r}"
    for option, dtype in {"grad_dtype": grad_dtype, "wire_dtype": wire_dtype}.items():
        if dtype is not None and dtype not in FLOATING:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATING)
            return "TypeError", f"{option}: expected one of {names}, got {dtype}"
    return None
