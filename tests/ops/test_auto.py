"""The transport that nobody asked for: the same on all ranks, and never an error for who shares no memory."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.on_ranks import on_ranks
from tests.ops.parallel_behaviour import block, operands_of, with_gradients
from tests.ops.parallel_cases import Setting, close, prepare
from tests.ops.transport_cases import heard, using
from tpkernels.comm import schedule
from tpkernels.comm.calls import Calls
from tpkernels.comm.schedule import worth_sharing
from tpkernels.comm.transports import select
from tpkernels.comm.transports.rows import Terms
from tpkernels.dispatch import backends
from tpkernels.ops.tensor_parallel.parallel import split_of

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="memory of the CPU is shared")

KIB = 1024
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)


def opened(group: dist.ProcessGroup) -> list[tuple[str, tuple[int, int]]]:
    """(what it is for, the shape of a shard) of each exchange that is open."""
    return [key[:2] for key in select._of_group[id(group)]._open]


def told_of_a_block(place: str, as_this_rank: AbstractContextManager[object]) -> tuple[list[str], list[str]]:
    """(what exchanges are for that a block opens, lines of the log), if its numbers are those of c10d."""
    operands = operands_of(0)
    with using("c10d"):
        run = partial(block, sequence_parallel=True, group=dist.new_group())
        expected = with_gradients(run, operands)
    group = dist.new_group()
    with using(f"auto{place}"), as_this_rank, heard("tpkernels.choices") as said:
        found = with_gradients(partial(block, sequence_parallel=True, group=group), operands)
    assert close(found, expected, 1e-6)
    return sorted({purpose for purpose, _ in opened(group)}), said


def _moved(group: dist.ProcessGroup, dtype: torch.dtype, rows: int, cols: int = 8) -> bool:
    """Whether a gather, a reduce and an all-reduce of so many rows a rank are exact; whole numbers are."""
    rank, ranks = dist.get_rank(group), group.size()
    shards = [(torch.arange(rows * cols).view(rows, cols) % 7 + owner).to(dtype) for owner in range(ranks)]
    full = torch.cat(shards)
    tp, times = split_of("op", group, True), sum(range(1, ranks + 1))
    terms = Terms(*full.shape, full, (full * (rank + 1)).__getitem__)
    gathered = tp.gather("op", "x", shards[rank]).all()
    ours, total = tp.reduce("op", terms).wait(), tp.all_reduce("op", terms).wait()
    return bool(gathered.equal(full) and ours.equal(shards[rank] * times) and total.equal(full * times))


@on_ranks()
@pytest.mark.parametrize("world", ["ranks2", "ranks4"])
def test_tensors_of_all_kinds_arrive():
    """Those that have bytes through shared memory: a gather and a reduce of each dtype are open."""
    prepare(Setting())
    group, odd = dist.group.WORLD, torch.ones(5, 8)
    with using("auto"):
        for dtype in DTYPES:
            assert _moved(group, dtype, 4), dtype
        assert _moved(group, torch.float32, 0), "no rows"
        assert _moved(group, torch.float32, 4, 0), "no columns"
        total = split_of("op", group).reduce("op", Terms(5, 8, odd, odd.__getitem__)).wait()
        assert total.equal(odd * group.size()), "rows that ranks do not divide"
        assert len(opened(group)) == 2 * len(DTYPES)


@on_ranks(2)
def test_lengths_that_change_close_nothing():
    prepare(Setting())
    group = dist.group.WORLD
    with using("auto"), patch.object(select, "MOST_OPEN", 3), heard("tpkernels.choices") as said:
        x = torch.ones(1, 64)
        for rows in (2, 3, 4, 5, 6, 2, 5):
            gathered = split_of("op", group, True).gather("op", "x", x.expand(rows, 64)).all()
            assert gathered.equal(x.expand(rows * group.size(), 64))
        assert [rows for _, (rows, _) in opened(group)] == [2, 3, 4]
    assert [line.endswith("c10d (3 shapes are open)") for line in said] == [False] * 3 + [True] * 2


@on_ranks(2)
def test_an_all_reduce_is_all_shared_or_not_at_all():
    """Whether or not all that it needs may be open."""
    prepare(Setting())
    for most, purposes in ((1, ["gathers"]), (2, ["gathers", "reduces"])):
        group = dist.new_group()
        with using("auto"), patch.object(select, "MOST_OPEN", most):
            split_of("op", group, True).gather("op", "x", torch.ones(4 * most, 8)).all()  # is opened
            x = torch.ones(16 * group.size(), 8)
            total = split_of("op", group).reduce("op", Terms(*x.shape, x, x.__getitem__)).wait()
            assert total.equal(x * group.size())
        assert [purpose for purpose, _ in opened(group)] == purposes


@on_ranks(2)
def test_memory_that_one_rank_lacks_is_a_line_in_the_log_of_the_first():
    prepare(Setting())
    fail, group = patch.object(os, "ftruncate", side_effect=MemoryError("planted")), dist.group.WORLD
    with using("auto"), heard("tpkernels.comm") as said:
        with fail if dist.get_rank() == 1 else nullcontext():
            assert _moved(group, torch.float32, 4)
        assert _moved(group, torch.float32, 6), "also when there would be memory again"
        assert opened(group) == []
    assert len(said) == (dist.get_rank() == 0)
    for line in said:
        assert "rank 1 cannot take part: MemoryError: planted; what has no shared memory" in line


@on_ranks(2)
def test_ranks_of_one_machine_share_memory():
    prepare(Setting())
    purposes, said = told_of_a_block("", nullcontext())
    assert purposes == ["gathers", "reduces"]
    assert len(said) == len(set(said)), "a line for each new shape"
    assert "gathers of 8 x 24 float32 a rank, process group" in said[0]
    assert said[0].endswith("of 2 ranks: shared (all ranks are on one machine)")


@on_ranks(2)
def test_what_one_rank_knows_decides_for_all():
    rank = dist.get_rank()
    other_network = patch.object(os, "readlink", lambda path: f"{path} of {rank}")
    interpreted = patch.object(backends, "backend", "triton" if rank else "torch")
    untagged = patch.object(Calls, "has_tags", lambda self, device: False)
    for place, as_this_rank, small_pieces, why in (
        (" apart", nullcontext(), True, "ranks are on 2 machines"),
        ("", other_network, True, "ranks are on 2 machines"),
        ("", interpreted, True, "rank 1: TPKERNELS_BACKEND=triton, whose kernels would wait"),
        ("", untagged, True, "its backend is not gloo"),
        ("", nullcontext(), False, "it is small"),
    ):
        prepare(Setting(small_pieces=small_pieces))
        purposes, said = told_of_a_block(place, as_this_rank)
        assert purposes == []
        assert said
        for line in said:
            assert f"of 2 ranks: c10d ({why}" in line


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
