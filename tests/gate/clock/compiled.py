"""Cubins of catalog entries and of small kernels, compiled in a process whose kernels are not interpreted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from base64 import b64decode
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.gate.clock.functional import Ran, run_block
from tpkernels.gate.clock.cubin import Cubin, read
from tpkernels.gate.clock.semantics import Step, translate
from tpkernels.gate.clock.values import Argument

_COMPILE = """
import base64, json, sys, triton
from tpkernels.gate.ahead_of_time import ast_source, gpu_target
from tpkernels.gate.catalog import catalog
name = sys.argv[1]
entry = next(one for one in catalog() if one.name == name and "sm_90" in one.architectures)
compiled = triton.compile(ast_source(entry), target=gpu_target("sm_90"), options=entry.options)
threads = compiled.metadata.num_warps
print(json.dumps([base64.b64encode(compiled.asm["cubin"]).decode(), threads, dict(entry.arguments)]))
"""


@dataclass(frozen=True, slots=True)
class Kernel:
    name: str
    cubin: Cubin
    program: list[Step]
    warps: int  # of a block
    types: Mapping[str, str]  # of run-time arguments

    def run(self, numbers: Mapping[str, int], *, blocks: int, block: int = 0) -> Ran:
        """numbers: of the integer arguments; pointers lie far apart, descriptors are unknown."""
        arguments = self.arguments(numbers)
        return run_block(
            self.cubin,
            arguments,
            grid=(blocks, 1, 1),
            block=(block, 0, 0),
            warps=self.warps,
            program=self.program,
        )

    def arguments(self, numbers: Mapping[str, int]) -> list[Argument]:
        given: list[Argument] = []
        for number, (name, kind) in enumerate(self.types.items()):
            if kind.startswith("tensordesc"):
                dimensions = kind[: kind.index("]")].count(",") + 1
                given += [None, *[1 << 12] * dimensions, *[1 << 12] * dimensions]
            elif kind.startswith("*"):
                given.append(0x7F00_0000_0000 + (number << 32))
            else:
                given.append(1e-5 if kind == "fp32" else numbers[name])
        return [*given, 0, 0]  # scratch memory, of which nothing is used


@cache
def kernel(name: str) -> Kernel:
    """An entry of the catalog."""
    content, warps, types = json.loads(_without_interpreter(_COMPILE, name))
    cubin = read(b64decode(content))
    return Kernel(name, cubin, translate(cubin), warps, types)


def cubin_of(script: str, folder: Path, *arguments: str) -> bytes:
    """What a script, which Triton wants in a file, prints as base64."""
    path = folder / "kernel.py"
    path.write_text(script)
    return b64decode(_without_interpreter(None, str(path), *arguments))


def _without_interpreter(code: str | None, *arguments: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, *(["-c", code] if code else []), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
