"""Names for the parts of a step, as profilers show them: torch's own, and on GPUs those that read NVTX."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.profiler import record_function


@contextmanager
def phase(name: str) -> Iterator[None]:
    """`with phase("forward"):`, or a decorator."""
    named = f"tpkernels: {name}"
    with record_function(named):
        if not torch.cuda.is_available():
            yield
            return
        with torch.cuda.nvtx.range(named):
            yield
