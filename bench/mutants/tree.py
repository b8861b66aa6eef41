"""A private copy of a checkout: a fault is planted in it, tests run, and it is as before."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from bench.mutants.draw import Mutant

PRELOAD = ["torch", "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.tensor"]
PRELOAD += ["triton", "triton.language", "numpy", "hypothesis", "pytest", "_pytest.assertion.rewrite"]
SERVER = Path(__file__).with_name("server.py")
LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv*", ".*_cache", ".hypothesis", "__pycache__", "build", "dist", "out"
)


class Absent(ValueError):
    """The line of a fault is not in this checkout, or the fault does not compile."""


class Tree:
    def __init__(self, checkout: Path, folder: Path, preload: Sequence[str] = PRELOAD) -> None:
        """folder: an empty one, for a copy of the checkout and its caches"""
        self.root = folder / "tree"
        shutil.copytree(checkout, self.root, ignore=LEFT_OUT, symlinks=True)
        shutil.copytree(
            checkout / "out", self.root / "out", ignore=lambda _, names: {*names} - {".gitignore"}
        )
        self._log = folder / "pytest.log"
        self._when = count(1_000_000_000)  # Python takes a file of the same size and time for the same file
        environment = {"PYTHONPATH": str(self.root), "TPKERNELS_CACHE_DIR": str(folder / "cache")}
        self._environment = os.environ | environment | {"OMP_NUM_THREADS": "1"}
        if (self.root / "csrc").exists() and not list((self.root / "tpkernels").glob("*.so")):
            self._build()
        self._server = subprocess.Popen(
            [sys.executable, SERVER, *preload],
            cwd=self.root,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(
        self, tests: Sequence[str], seconds: float, hang: float, without: Sequence[str] = ()
    ) -> dict[str, Any]:
        """How tests ended; see `server`."""
        limits = {"seconds": seconds, "hang": hang, "log": str(self._log)}
        request = json.dumps({"tests": [*tests], "without": [*without], **limits})
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        print(request, file=self._server.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self._server.stdout.readline())
        return answer

    @contextmanager
    def with_fault(self, fault: Mutant, *, reached: bool = False) -> Iterator[None]:
        """reached: an error stands before the line instead, so that tests which reach it fail"""
        path = self.root / fault.file
        sound = path.read_text() if path.exists() else ""
        lines = sound.splitlines()
        like_it = [i for i, line in enumerate(lines) if line == fault.before]
        if not like_it:
            raise Absent("this checkout has no such line")
        at = min(like_it, key=lambda i: abs(i + 1 - fault.line))
        lines[at] = fault.after
        faulty = _stopping_before(sound, at + 1) if reached else "\n".join(lines) + "\n"
        with self._keeping_extension(path.suffix != ".py"):
            try:
                self._write(path, faulty)
                if path.suffix != ".py":
                    self._build()
                yield
            finally:
                self._write(path, sound)

    def close(self) -> None:
        self._server.kill()
        self._server.wait()

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text)
        if path.suffix == ".py":
            os.utime(path, (when := next(self._when), when))

    @contextmanager
    def _keeping_extension(self, is_needed: bool) -> Iterator[None]:
        built = list((self.root / "tpkernels").glob("*.so")) if is_needed else []
        kept = [library.rename(library.with_suffix(".kept")) for library in built]
        try:
            yield
        finally:
            for library, sound in zip(built, kept, strict=True):
                sound.replace(library)

    def _build(self) -> None:
        command = ["nice", sys.executable, "setup.py", "build_ext", "--inplace", "--force"]
        environment = self._environment | {"TPKERNELS_REQUIRE_EXT": "1", "TPKERNELS_CXXFLAGS": "-O1"}
        ran = subprocess.run(
            command, cwd=self.root, env=environment, capture_output=True, text=True, check=False
        )
        if ran.returncode:
            raise Absent("it does not compile")


def _stopping_before(text: str, number: int) -> str:
    """Python that raises where it comes to the statement of a line."""
    lines, best = text.splitlines(), 1
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.stmt) and node.lineno <= number <= (node.end_lineno or 0):
            is_elif = lines[node.lineno - 1].lstrip().startswith("elif ")
            first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))])
            best = max(best, 0 if is_elif else first)
    indent = lines[best - 1][: len(lines[best - 1]) - len(lines[best - 1].lstrip())]
    lines.insert(best - 1, f'{indent}raise SystemError("reached")')
    return "\n".join(lines) + "\n"
