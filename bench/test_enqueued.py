"""What ops enqueue on a GPU, counted without one: launches of kernels on an H100, and tasks of streams."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch

from bench.cases.local import Local
from bench.counts import Counts, added, counts_of
from bench.streams.cases import all_programs
from tpkernels.dispatch import backends
from tpkernels.kernels import launch
from tpkernels.kernels.target import H100

Counted = Callable[[Counts], None]
LOCAL = Local(torch.bfloat16, "meta")
BUILDS = ("linear", "linear_gelu", "swiglu", "mlp", "gated_mlp", "rms_norm", "layer_norm")
OPS = ("column, sequence-parallel", "row, sequence-parallel", "mlp, sequence-parallel")
PROGRAMS = [f"{op}/{way}/eager/2 ranks" for op in OPS for way in ("c10d, 1 rounds", "symmetric")]
PROGRAMS += [f"{op}/symmetric/eager/2 ranks" for op in ("gated mlp", "vocabulary")]


@pytest.mark.smoke
@pytest.mark.parametrize("build", BUILDS)
def test_launches(counted: Counted, monkeypatch: pytest.MonkeyPatch, build: str) -> None:
    """Forward and backward by our kernels alone."""
    monkeypatch.setattr(backends, "backend", "triton")
    sizes = (8192, 4096) if build.endswith("norm") else (4096, 4096, 1792)
    with launch.recording(H100) as launches:
        run = getattr(LOCAL, build)(*sizes).ways["ours"]
        counts = counts_of(run)
        launches.clear()
        run()
    counted(counts | {"launches": Counter(one.kernel.__name__ for one in launches)})


@pytest.mark.smoke
@pytest.mark.parametrize("name", PROGRAMS)
def test_tasks(counted: Counted, name: str) -> None:
    """Of all ranks, on the machine of `bench streams`."""
    program, _ = all_programs()[name]()
    tasks, sent, moved = (Counter[str]() for _ in range(3))
    for task in program.tasks:
        tasks[task.name] += 1
        sent[task.name] += sum(end.rows.nbytes for end in task.ends if end.sends and end.rows is not None)
        spans = (span for steps in task.programs for step in steps for span in (*step.reads, *step.writes))
        moved[task.name] += sum(end - start for start, end in spans)
    counted(added([{"tasks": tasks, "bytes sent": sent, "bytes read and written": moved}]))
