"""How much Python a call of a layer runs through: calls into our files, the files, and frames at a transfer.

Two ranks over gloo, few rows, sequence-parallel, in the steady state. The counts are exact.
"""

from __future__ import annotations

from collections.abc import Callable
from traceback import walk_stack
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import tpkernels
from bench.counts import ROOT, WARM, python_calls
from tests.on_ranks import on_ranks
from tpkernels.comm.tensor_parallel import TensorParallel

TOKENS, NARROW, WIDE = 64, 64, 128  # of a rank; features


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


class FirstSend(TorchDispatchMode):
    """Frames of ours when the first message leaves."""

    frames = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d" and not self.frames:
            ours = (frame.f_code.co_filename.startswith(ROOT) for frame, _ in walk_stack(None))
            self.frames = sum(ours)
        return function(*args, **(kwargs or {}))


def way_of(run: Callable[[], object]) -> Way:
    """What a call runs through in this thread."""
    calls = python_calls(run)
    with FirstSend() as sending:
        run()
    return Way(calls.total(), len(calls), sending.frames)


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
