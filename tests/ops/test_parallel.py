"""Ops over a group, over c10d: unsharded numbers, whatever the number of ranks; mistakes."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.on_ranks import on_ranks
from tests.ops import parallel_cases
from tests.ops.parallel_behaviour import message_of
from tests.ops.parallel_cases import Setting, assert_within, prepare, run_all
from tests.products import combined, pairwise
from tpkernels.comm.schedule import bounds
from tpkernels.comm.tensor_parallel import AllReduce, TensorParallel
from tpkernels.comm.transports.rows import Terms
from tpkernels.ops import column_linear, row_linear
from tpkernels.ops.tensor_parallel import parallel
from tpkernels.ops.tensor_parallel.parallel_mlp import parallel_mlp

WORLDS = ["ranks1", "ranks2", "ranks4"]
ACTIVATIONS = {"column": [None, "gelu"], "row": [None], "mlp": ["gelu_tanh", "swiglu"]}


@combined
@pairwise(
    world=WORLDS, name=list(ACTIVATIONS), dtype=[torch.float32, torch.bfloat16, torch.float16, torch.float64]
)
def test_any_number_of_ranks_gives_the_unsharded_numbers(ranks, name, dtype, combined):
    settings = [
        Setting(dtype, sequence_parallel, overlap, activation=activation, main_grad=main_grad)
        for sequence_parallel, overlap, main_grad, activation in combined(
            [False, True], [False, True], [False, True], ACTIVATIONS[name]
        )
        if not (main_grad and dtype is torch.float64)
    ]
    if dtype.itemsize == 2:
        settings.append(Setting(dtype, activation=ACTIVATIONS[name][-1], main_grad="of the weight's dtype"))
    if dtype is torch.float32:  # leading dimensions are any
        settings += [
            Setting(leading=leading, activation=ACTIVATIONS[name][-1], small_pieces=small)
            for leading, small in product(((8, 3), (4, 2, 2), (12, 1), (0,), (8, 0)), (False, True))
        ]
        settings += [
            Setting(leading=leading, activation=ACTIVATIONS[name][-1], sequence_parallel=False)
            for leading in ((), (1,), (7,), (3, 5), (0,))
        ]
    assert_within(ranks.run(run_all, name, settings), settings)


def test_options_of_column(ranks):
    settings = [
        Setting(bias=False),
        Setting(save_gathered=True, activation="relu2"),
        Setting(save_gathered=True, sequence_parallel=False),
        Setting(features=(7, 12), activation="silu"),
    ]
    assert_within(ranks.run(run_all, "column", settings), settings)


@on_ranks(2)
def test_a_doubled_bias_would_be_seen():
    """One that lands once a rank is far beyond what is allowed."""

    def doubled(x: Tensor, w: Tensor, b: Tensor, group: dist.ProcessGroup, **options: Any) -> Tensor:
        return row_linear(x, w, b * group.size(), group, **options)

    with patch.object(parallel_cases, "row_linear", doubled):
        assert parallel_cases.row(Setting())["y"] > 1000


@pytest.mark.parametrize("world", ["ranks2", "ranks4"])
@on_ranks()
def test_both_ways_to_all_reduce_sum_in_the_order_of_ranks():
    """To the bit, of rows that ranks and chunks divide or not."""
    prepare(Setting())
    group, dtypes = dist.group.WORLD, [torch.float32, torch.bfloat16, torch.float64]
    for (rows, cols), chunks, dtype in product([(16, 6), (7, 3), (1, 5), (0, 4)], [1, 3], dtypes):
        torch.manual_seed(0)
        parts = [torch.randn(rows, cols).to(dtype) for _ in range(group.size())]
        bias = torch.randn(cols).to(dtype)
        total = sum(part.to(torch.promote_types(dtype, torch.float32)) for part in parts)
        exact, own = (total + bias).to(dtype), parts[group.rank()]
        chunk_rows = [slice(*bounds(rows, chunks, chunk)) for chunk in range(chunks)]
        terms, tp = Terms(rows, cols, own, own.__getitem__), TensorParallel(group)
        for swaps in (False, True):
            total = AllReduce(tp, "sum", terms, bias, chunk_rows, swaps=swaps).wait()
            assert total.equal(exact), f"({rows}, {cols}) {dtype} in {chunks} chunks, {swaps=}"


@on_ranks(2)
def test_mistakes_are_errors_on_every_rank():
    group = dist.group.WORLD
    x, w = torch.randn(6, 8), torch.randn(8, 8)
    split: dict[str, Any] = {"sequence_parallel": True}
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: row_linear(x[:5], w, None, group, **split), "divisible by the 2 ranks"),
        (lambda: column_linear(x, w, None, None), "expected a process group"),
        (lambda: column_linear(x, torch.randn(8, 7), None, group), "expected x (..., in_features)"),
        (lambda: row_linear(x, w.half(), None, group), "expected one dtype"),
        (lambda: column_linear(x[0], w, None, group, **split), "expected x (tokens, ..., in_features)"),
        (lambda: column_linear(x, [w, w], [None], group), "as many of bias_shard as of weight_shard"),
        (lambda: row_linear(x, w, None, group, main_grad=torch.zeros(3, 8)), "expected main_grad (8, 8)"),
        (
            lambda: row_linear(x.to("meta"), w.to("meta"), None, group),
            "ValueError: row_linear: expected tensors on cpu",
        ),
        (lambda: parallel_mlp(x, w, x[0], w, None, group, w_gate_shard=w), "a gated unit has no biases"),
    ]
    for call, words in calls:
        assert words in message_of(call)


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
def test_a_debug_mode_that_is_neither_on_nor_off_is_refused(monkeypatch):
    monkeypatch.setenv("TPKERNELS_DEBUG", "yes")
    with pytest.raises(ValueError, match="TPKERNELS_DEBUG is 'yes'; expected 0 or 1"):
        runpy.run_module(parallel.__name__)  # what is read once, as at the first import
