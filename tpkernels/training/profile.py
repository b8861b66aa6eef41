"""Names for the parts of a step, and a trace of one step for chrome://tracing or ui.perfetto.dev."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

WARM_UP = 3  # the first steps learn the buckets' order and touch memory that later ones have


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Name what runs within, in traces and on GPUs as a range of NVTX; also a decorator."""
    named = f"tpkernels: {name}"
    with record_function(named):
        if not torch.cuda.is_available():
            yield
            return
        with torch.cuda.nvtx.range(named):
            yield


class StepProfile:
    """A context of every step of a run, which records one; a trace that cannot be written ends no run."""

    def __init__(self, folder: Path, rank: int, *, done: int, steps: int, step: int | None = None) -> None:
        """done, steps: where the run begins and ends; step: by default one after warming up"""
        folder.mkdir(parents=True, exist_ok=True)
        self.step = min(done + WARM_UP + 1, steps) if step is None else step
        self.path = folder / f"step-{self.step:08}-rank-{rank}.json"
        self.came = False
        self._done, self._steps = done, steps

    @property
    def comes(self) -> bool:
        """Whether the step to record is one of this run."""
        return self._done < self.step <= self._steps

    def outcome(self) -> str:
        """Return in a line what became of the profile."""
        if not self.came:
            began = f"this run began after {self._done} of {self._steps}"
            return f"no profile: step {self.step} did not come; {began}"
        if not self.path.is_file():
            return f"no profile: {self.path} could not be written"
        return f"profile of step {self.step}: {self.path.parent}/step-{self.step:08}-rank-*.json"

    @contextmanager
    def __call__(self, step: int) -> Iterator[None]:
        if step != self.step:
            yield
            return
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities) as trace:
            yield
        self.came = True
        with suppress(OSError):
            trace.export_chrome_trace(str(self.path))
