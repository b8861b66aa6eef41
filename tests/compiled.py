"""A process that compiles kernels, for tests, whose own process interprets them.

    def test_linear_spills_nothing(compiler: Compiler) -> None:
        assert compiler.run(facts_of, entry, "sm_90").spills == 0
        assert compiler.command(folder, "check", "--only", "linear").returncode == 0

It imports torch and Triton once. Each command runs in a fork of another such process: as it may be that of a
copy of the package, nothing may have registered the package's operators before. What is compiled is kept by
content, in a folder that all workers of pytest share for a run: no test need know what others compile.
"""

from __future__ import annotations

import faulthandler
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryFile
from typing import Any, TypeVar

from tests.patience import patient

T = TypeVar("T")


class Compiler:
    def __init__(self, process: Callable[[], ProcessPoolExecutor], cache: Path) -> None:
        """process: start one"""
        self._new_process = process
        self.cache = cache  # of what was compiled, as TPKERNELS_CACHE_DIR

    @cached_property
    def _process(self) -> ProcessPoolExecutor:
        return self._new_process()

    @cached_property
    def _process_of_commands(self) -> ProcessPoolExecutor:
        return self._new_process()

    def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """What a function of a module returns there."""
        return self.start(function, *arguments).result(patient(300))

    def start(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        """The same, while the test goes on: what is asked for first is answered first."""
        return self._process.submit(function, *arguments)

    def command(self, folder: Path, *arguments: str, **variables: str) -> CompletedProcess[str]:
        """`python -m tpkernels ARGUMENTS` in a folder, by the copy of the package that is there, if one is.

        variables: of the environment
        """
        environment = {"TPKERNELS_CACHE_DIR": str(self.cache)} | variables
        ended = self._process_of_commands.submit(_command, folder, arguments, environment, patient(280))
        return ended.result(patient(300))


@dataclass(frozen=True)
class Assembly:
    """What Triton made of an entry."""

    ptx: str
    cubin: bytes
    warps: int
    shared: int
    boxes: tuple[Mapping[str, Any], ...]  # that descriptors move, as Triton says


def assembly_of(entry: Any, architecture: str = "sm_90") -> Assembly:
    """To be run where kernels are compiled."""
    import triton

    from tpkernels.gate.ahead_of_time import ast_source, gpu_target

    made = triton.compile(ast_source(entry), target=gpu_target(architecture), options=entry.options)
    meta = made.metadata
    return Assembly(
        made.asm["ptx"], made.asm["cubin"], meta.num_warps, meta.shared, tuple(meta.tensordesc_meta or ())
    )


@contextmanager
def compiling(cache: Path) -> Iterator[Compiler]:
    with ExitStack() as processes:
        yield Compiler(lambda: processes.enter_context(_process(cache)), cache)


@contextmanager
def _process(cache: Path) -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(
        1, mp_context=get_context("spawn"), initializer=_compile_once, initargs=(cache,)
    ) as process:
        interpreted = os.environ.pop("TRITON_INTERPRET", None)  # read on import
        try:
            process.submit(os.getpid).result(patient(120))
        finally:
            if interpreted is not None:
                os.environ["TRITON_INTERPRET"] = interpreted
        yield process


def _compile_once(cache: Path) -> None:
    """Triton's own cache lasts for the run; what the gate compiles would be in a folder that it removes."""
    import triton

    import tpkernels.gate.compile_gate
    import tpkernels.gate.numerics
    import tpkernels.gate.report  # noqa: F401  # forks have them

    compile_anew, folder = triton.compile, str(cache / "triton")

    def compile_or_remember(source: Any, target: Any = None, options: Any = None) -> Any:
        with triton.knobs.cache.scope():
            triton.knobs.cache.dir = folder
            return compile_anew(source, target=target, options=options)

    triton.compile = compile_or_remember
    os.environ["TPKERNELS_CACHE_DIR"] = str(cache)


def _command(
    folder: Path, arguments: tuple[str, ...], variables: Mapping[str, str], seconds: float
) -> CompletedProcess[str]:
    with TemporaryFile() as output, TemporaryFile() as errors:
        process = os.fork()
        if process == 0:
            code = 1
            try:
                faulthandler.dump_traceback_later(seconds, exit=True, file=errors)
                os.dup2(output.fileno(), 1)
                os.dup2(errors.fileno(), 2)
                code = _main(folder, arguments, variables)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(process, 0)
        said = []
        for file in (output, errors):
            file.seek(0)
            said.append(file.read().decode())
        return CompletedProcess(arguments, os.waitstatus_to_exitcode(status), *said)


def _main(folder: Path, arguments: tuple[str, ...], variables: Mapping[str, str]) -> int:
    os.chdir(folder)
    os.environ |= variables
    sys.argv = ["tpkernels", *arguments]
    if (folder / "tpkernels").exists():
        os.environ["PYTHONPATH"] = str(folder)  # of what it starts itself
        sys.path.insert(0, str(folder))
        for name in [name for name in sys.modules if name.split(".")[0] == "tpkernels"]:
            del sys.modules[name]
    try:
        runpy.run_module("tpkernels", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0
