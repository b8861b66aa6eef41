"""How much Python a call of a layer runs through: calls into our files, the files, and frames at a transfer.

Two ranks over gloo, few rows, sequence-parallel, in the steady state. The counts are exact.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import tpkernels
from tests.on_ranks import on_ranks
from tpkernels.comm.tensor_parallel import TensorParallel

ROOT = str(Path(tpkernels.__file__).parent) + "/"
TOKENS, NARROW, WIDE = 64, 64, 128  # of a rank; features
WARM = 12  # calls before the one that is counted


class Way(NamedTuple):
    calls: int  # of Python, into our files
    files: int
    frames: int  # of ours, when the first message leaves


# at most; who makes a way shorter lowers its limits
LIMITS = {
    "column": Way(35, 13, 10),
    "column with backward": Way(80, 15, 10),
    "row": Way(35, 13, 10),
    "row with backward": Way(75, 15, 10),
    "pair": Way(70, 14, 10),
    "pair with backward": Way(155, 16, 10),
}


def way_of(run: Callable[[], object]) -> Way:
    """What a call runs through in this thread, and in threads that it starts."""
    calls, files, frames = 0, set[str](), 0

    def count(frame: FrameType, event: str, what: object) -> None:
        nonlocal calls, frames
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(ROOT):
            calls += 1
            files.add(file)
        elif event == "c_call" and not frames and getattr(what, "__name__", "") == "send":
            at: FrameType | None = frame
            while at is not None:
                frames += at.f_code.co_filename.startswith(ROOT)
                at = at.f_back

    gc.collect()
    gc.disable()  # what it ends is not of this call
    threading.setprofile(count)
    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
        gc.enable()
    return Way(calls, len(files), frames)


def calls_of_layers() -> dict[str, Callable[[], Tensor]]:
    tpkernels.initialize_model_parallel(tensor_model_parallel_size=2)
    column = tpkernels.ColumnParallelLinear(
        NARROW, WIDE, gather_output=False, bias=True, sequence_parallel=True
    )
    row = tpkernels.RowParallelLinear(WIDE, NARROW, input_is_parallel=True, bias=True, sequence_parallel=True)
    x = torch.randn(TOKENS, NARROW, requires_grad=True)
    h = torch.randn(2 * TOKENS, WIDE // 2, requires_grad=True)
    return {
        "column": lambda: column(x)[0],
        "row": lambda: row(h)[0],
        "pair": lambda: row(functional.gelu(column(x)[0]))[0],
    }


def steady_way(run: Callable[[], object]) -> Way:
    for _ in range(WARM):
        run()
    return way_of(run)


@pytest.mark.parametrize("case", LIMITS)
@on_ranks(2)
def test_a_call_runs_through_so_much_python_at_most(case):
    layers, _, backward = case.partition(" with ")
    forward = calls_of_layers()[layers]
    found = steady_way((lambda: forward().sum().backward()) if backward else forward)
    assert found.frames, "a message was seen to leave"
    assert all(here <= most for here, most in zip(found, LIMITS[case], strict=True)), found


@on_ranks(2)
def test_one_more_frame_is_seen():
    source = "def planted(*args, **options):\n    return gather(*args, **options)\n"
    scope = {"gather": TensorParallel.gather}
    exec(compile(source, f"{ROOT}planted.py", "exec"), scope)
    column = calls_of_layers()["column"]
    usual = steady_way(column)
    with patch.object(TensorParallel, "gather", scope["planted"]):
        assert steady_way(column) == Way(*(each + 1 for each in usual))
