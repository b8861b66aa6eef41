"""torch's eager async tensor parallelism, counted without a GPU: what its operators are made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from bench.cases import async_tp
from bench.cases.launches import CASES, FEATURES, counted, group_of
from bench.streams.prediction import enqueued
from tpkernels.kernels.target import H100
from tpkernels.planning.step_time import Sizes

RANKS, ROWS, FEATURES_IN, FEATURES_OUT = 4, 64, 32, 16


def noted_of(call: Callable[[Tensor, Tensor], object], rows: int) -> Counter[str]:
    noted: Counter[str] = Counter()
    x = torch.empty(rows, FEATURES_IN, device="meta", dtype=torch.bfloat16)
    w = torch.empty(FEATURES_IN, FEATURES_OUT, device="meta", dtype=torch.bfloat16)
    with (
        group_of(RANKS) as group,
        async_tp.async_tp_without_memory(group, noted),
        async_tp.Noted(noted),
    ):
        call(x, w)
    return noted


def test_an_all_gather_is_a_product_and_a_copy_for_each_rank():
    op = torch.ops.symm_mem.fused_all_gather_matmul
    noted = noted_of(lambda x, w: op(x, [w], 0, "counting"), ROWS // RANKS)
    of_others = (RANKS - 1) * ROWS // RANKS * FEATURES_IN * 2
    # copies: into own memory, from each other rank, and own rows into the result
    expected = {"products": RANKS, "copies": RANKS + 1, "barriers": 3, "waits": 3, "bytes": of_others}
    assert noted == expected


def test_a_reduce_scatter_meets_twice_for_each_other_rank():
    op = torch.ops.symm_mem.fused_matmul_reduce_scatter
    noted = noted_of(lambda x, w: op(x, w, "sum", 0, "counting"), ROWS)
    of_others = (RANKS - 1) * ROWS // RANKS * FEATURES_OUT * 2
    # other kernels: one that sleeps, so that streams start in order, and the sum
    expected = {"products": RANKS, "copies": RANKS - 1, "barriers": 2 * RANKS, "waits": 2, "other_kernels": 2}
    assert noted == {**expected, "bytes": of_others}


def test_an_operator_of_which_nobody_has_said_what_it_is_is_an_error():
    with pytest.raises(KeyError, match="exp"):
        noted_of(lambda x, w: x.exp(), ROWS)


def test_torchs_operators_have_no_form_for_a_cpu():
    """When this fails, ours can be timed against them: say so in docs/trainers.md."""
    import_module("torch.distributed._symmetric_memory")
    x, w = torch.ones(4, 4), torch.ones(4, 4)
    with pytest.raises(NotImplementedError, match="'CPU' backend"):
        torch.ops.symm_mem.fused_all_gather_matmul(x, [w], 0, "none")
    with pytest.raises(NotImplementedError, match="'CPU' backend"):
        torch.ops.symm_mem.fused_matmul_reduce_scatter(x, w, "sum", 0, "none")


needs_torchtitan = pytest.mark.skipif(
    find_spec("torchtitan") is None, reason="torchtitan is not installed: make check-torchtitan"
)


@needs_torchtitan
@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("case", CASES)
def test_torchtitans_functions_send_what_ours_do_by_more_launches(case, ranks):
    tokens, width = 2048, 4096
    kind, direction = case.split()
    wide = (width, FEATURES[width])
    sizes = Sizes(tokens, *(wide if kind == "column" else wide[::-1]), ranks)
    theirs = async_tp.enqueued_by_torch(case, tokens, width, ranks)
    ours = counted(f"{kind}_linear", direction, "symmetric", sizes, True)
    transfers = 2 if case == "column backward" else 1
    of_others = tokens * width * 2 * (ranks - 1) // ranks
    assert theirs["bytes"] == transfers * of_others
    pushed = 0
    program, calls = enqueued.__wrapped__(
        f"{kind}_linear", direction, "symmetric", sizes, H100.processors, True
    )
    for task in (program.tasks[number] for number in calls[-1]):
        if task.work.kind == "copy" and task.work.to not in (None, task.rank):
            pushed += task.work.size[0]
    # rows that are scattered are stored by the kernel that multiplies: no copies
    assert pushed == (0 if case == "row forward" else of_others)
    assert theirs["products"] > ours["products"]
    assert theirs["barriers"] >= 3
    assert ours["barriers"] == 0


@needs_torchtitan
def test_host_times_are_of_both_in_one_run():
    times = async_tp.host_times("row forward", 2048, 4096, 2, "c10d", calls=3)
    assert set(times) == {"ours", "theirs"}
    assert min(times.values()) > 0
