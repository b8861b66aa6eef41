"""Names the phases of a step, and writes a trace of one step, for chrome://tracing or ui.perfetto.dev."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch.profiler import profile, record_function

WARM_UP = 3  # the first steps learn the buckets' order and touch memory for the first time


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Name a block, or a decorated function, in traces, and on GPUs as an NVTX range."""
    named = f"tpkernels: {name}"
    with record_function(named):
        if not torch.cuda.is_available():
            yield
            return
        with torch.cuda.nvtx.range(named):
            yield


class StepProfile:
    """A context for every step of a run that records one step; a run survives a failed write of the trace."""

    def __init__(self, folder: Path, rank: int, *, done: int, steps: int) -> None:
        """done, steps: the steps before and at the end of the run"""
        folder.mkdir(parents=True, exist_ok=True)
        self.step = min(done + WARM_UP + 1, steps)
        self.path = folder / f"step-{self.step:08}-rank-{rank}.json"

    def outcome(self) -> str:
        """Return the profile's outcome in a line."""
        if not self.path.is_file():
            return f"no profile: {self.path} could not be written"
        return f"profile of step {self.step}: {self.path.parent}/step-{self.step:08}-rank-*.json"

    @contextmanager
    def __call__(self, step: int) -> Iterator[None]:
        if step != self.step:
            yield
            return
        with profile() as trace:  # of the CPU, and of GPUs where there are any
            yield
        with suppress(OSError):
            trace.export_chrome_trace(str(self.path))
