"""The transport that nobody asked for: the same on all ranks, and never an error for who shares no memory."""

from __future__ import annotations

import pytest
import torch

from tests.ops import auto_cases as cases
from tpkernels.comm import schedule
from tpkernels.comm.schedule import worth_sharing

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="memory of the CPU is shared")

KIB = 1024


def test_ranks_of_one_machine_share_memory(ranks2):
    for purposes, off, said in ranks2.run(cases.block_over, "one machine"):
        assert purposes == ["gathers", "reduces"]
        assert off < 1e-6
        assert len(said) == len(set(said)), "a line for each new shape"
        assert "gathers of 8 x 24 float32 a rank, process group" in said[0]
        assert said[0].endswith("of 2 ranks: shared (all ranks are on one machine)")


@pytest.mark.parametrize(
    ("how", "why"),
    {
        "two machines": "ranks are on 2 machines",
        "two networks": "ranks are on 2 machines",
        "interpreted on one rank": "rank 1: TPKERNELS_BACKEND=triton, whose kernels would wait",
        "no tags": "its backend is not gloo",
        "small": "it is small",
    }.items(),
)
def test_what_one_rank_knows_decides_for_all(ranks2, how, why):
    for purposes, off, said in ranks2.run(cases.block_over, how):
        assert purposes == []
        assert off < 1e-6
        assert said
        for line in said:
            assert f"of 2 ranks: c10d ({why}" in line


@pytest.mark.parametrize("world", ["ranks2", "ranks4"])
def test_tensors_of_all_kinds_arrive(request, world):
    ranks = request.getfixturevalue(world)
    for exact, opened in ranks.run(cases.all_kinds_of_tensors):
        assert set(exact.values()) == {True}, exact
        assert opened == 2 * len(cases.DTYPES)


def test_lengths_that_change_close_nothing(ranks2):
    for exact, rows, said in ranks2.run(cases.more_shapes_than_may_be_open):
        assert exact == [True] * 7
        assert rows == [2, 3, 4]
        assert [line.endswith("c10d (3 shapes are open)") for line in said] == [False] * 3 + [True] * 2


def test_an_all_reduce_is_all_shared_or_not_at_all(ranks2):
    for exact, open_for in ranks2.run(cases.sums_that_are_half_open):
        assert exact == [True, True]
        assert open_for == ["gathers", "gathers reduces"]


def test_memory_that_one_rank_lacks_is_a_line_in_the_log_of_all(ranks2):
    for exact, said, opened in ranks2.run(cases.cannot_open_on_one_rank):
        assert exact == [True, True]
        (line,) = said
        assert "rank 1 cannot take part: MemoryError: planted; what has no shared memory" in line
        assert opened == 0


@pytest.mark.parametrize(
    ("shard", "ranks", "to_all", "worth"),
    [
        (127 * KIB, 2, False, False), (128 * KIB, 2, False, True),
        (42 * KIB, 4, False, False), (43 * KIB, 4, False, True),
        (511 * KIB, 2, True, False), (512 * KIB, 2, True, True),
        (16 * KIB, 4, True, False), (64 * KIB, 4, True, True),
        (0, 8, False, False), (0, 8, True, False),
    ],
)  # fmt: skip
def test_sizes_decide(monkeypatch, shard, ranks, to_all, worth):
    monkeypatch.setattr(schedule, "LEAST_BYTES", 128 * KIB)
    assert worth_sharing(shard, ranks, to_all=to_all) is worth


def test_more_bytes_or_ranks_are_never_worth_less():
    for to_all in (False, True):
        for ranks in range(2, 17):
            by_size = [worth_sharing(1 << size, ranks, to_all=to_all) for size in range(8, 28)]
            assert by_size == sorted(by_size), (ranks, to_all)
