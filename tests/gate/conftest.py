"""Kernels compiled for GPUs that this machine need not have."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tpkernels.gate.catalog import catalog
from tpkernels.kernels.tiles import KERNELS


@pytest.fixture(scope="session")
def compiled() -> dict[str, dict[str, Any]]:
    """What the compiler made of each kernel's largest tile, by architecture: at once, on a core each."""
    starts = {
        "sm_90": [f"{kernel}/descriptor/bf16" for kernel in (*KERNELS, "gather_linear")],
        "sm_80": [f"{kernel}/pointer/bf16" for kernel in KERNELS],
    }
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    program = [sys.executable, "-m", "tests.gate.compile_entries"]
    running = {}
    for architecture, stems in starts.items():
        names = [next(e.name for e in catalog() if e.name.startswith(stem)) for stem in stems]
        running[architecture] = subprocess.Popen(
            [*program, architecture, *names],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    told = {architecture: process.communicate() for architecture, process in running.items()}
    for architecture, process in running.items():
        assert process.returncode == 0, told[architecture][1][-2000:]
    return {architecture: json.loads(printed) for architecture, (printed, _) in told.items()}
