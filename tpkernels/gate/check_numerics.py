"""Runs the program `numerics` for `check`, in Triton's interpreter, and remembers a run without a finding."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryFile

from tpkernels.kernels.disk_cache import DiskCache

PACKAGE = Path(__file__).parents[1]
SOURCES = ("kernels/*.py", "cli/numeri*.py", "gate/name_filter.py")


@dataclass(frozen=True)
class Computed:
    """A case with what came of it."""

    case: str
    error: float  # the largest, as a part of what is allowed
    failure: str  # "" if there is none


def run_numerics(only: str, report: Callable[[str], None]) -> list[Computed]:
    """All cases that `only` names, see `has_parts`; `report` hears of each as it is done."""
    cache, key = DiskCache.of_user("numerics"), _key(only)
    remembered = cache.get(key)
    if remembered is not None:
        return [Computed(**case) for case in remembered]
    computed = _run(only, report)
    if not any(case.failure for case in computed):
        cache.put(key, [asdict(case) for case in computed])
    return computed


def _run(only: str, report: Callable[[str], None]) -> list[Computed]:
    computed = []
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tpkernels.gate.numerics", only]
    with (
        TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith('{"case"'):  # not what a library printed
                computed.append(Computed(**json.loads(line)))
                report(computed[-1].case)
        if process.wait():
            errors.seek(0)
            last_words = [line.strip() for line in errors if line.strip()][-1:] or ["no message"]
            failure = f"ended with exit code {process.returncode}: {last_words[0]}"
            computed.append(Computed("the interpreter", float("nan"), failure))
    return computed


def _key(only: str) -> str:
    """What the results depend on."""
    digest = hashlib.sha256()
    for pattern in SOURCES:
        for path in sorted(PACKAGE.glob(pattern)):
            digest.update(path.name.encode() + path.read_bytes())
    versions = [f"{name} {import_module(name).__version__}" for name in ("triton", "numpy", "torch")]
    return f"{only} {versions} {digest.hexdigest()}"
