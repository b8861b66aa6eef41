"""Which way moves a shape between GPUs: all ranks decide alike, whatever each of them saw."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.dispatch.simulated_stream import SimulatedStream
from tests.ops import way_cases as cases
from tests.ops.way_cases import ROUNDS_AND_TRIAL as RUNS
from tests.ranks import RankPool
from tpkernels.dispatch.timing import SLACK, StreamTimer
from tpkernels.ops.tensor_parallel.way_chooser import _mismatch
from tpkernels.ops.tensor_parallel.ways import StreamClock

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="clocks and memory are stand-ins")


def chosen(ranks: RankPool, folder: Path | None = None, **options: object) -> list[cases.Found]:
    return ranks.run(cases.chosen, folder, options)


UNTOUCHED = {"one": 0, "many": 0, "memory": 0}


def test_the_slowest_rank_decides(ranks2):
    for name, source, runs, closed, said in chosen(ranks2):
        assert (name, source) == ("memory", "timed")  # "many" takes 5 ms here, and 20 there
        assert runs == {"one": RUNS, "many": RUNS, "memory": RUNS}
        assert sorted(closed) == ["many", "one"]
        assert said == []


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("cannot open", "rank 1: MemoryError: planted"),
        ("raises", "rank 1: RuntimeError: planted in a run"),
        ("wrong numbers", "rank 1: its result is off by 1.7e+00 of 1.7e+00"),
    ],
)
def test_a_way_that_fails_on_one_rank_is_dropped_on_all(ranks2, fault, why):
    for name, source, runs, closed, said in chosen(ranks2, broken={"memory": fault}):
        assert (name, source) == ("one", "timed")
        assert runs["one"] == runs["many"] == RUNS
        assert runs["memory"] <= 1
        assert "memory" in closed
        assert said == [f"memory dropped for {cases.KEY}: {why}"]


def test_where_no_other_way_works_nothing_is_timed_nor_kept(ranks2, tmp_path):
    broken = {"memory": "cannot open", "many": "wrong numbers"}
    for name, source, runs, _, said in chosen(ranks2, tmp_path, broken=broken):
        assert (name, source, len(said)) == ("one", "only one", 2)
        assert runs["one"] == 1
    assert list(tmp_path.rglob("*.json")) == []


def test_no_memory_for_scratch_on_one_rank_takes_the_default_on_all(ranks2):
    for name, source, runs, _, said in chosen(ranks2, broken={"one": "cannot open"}):
        assert (name, source) == ("one", "not timed")
        assert runs == UNTOUCHED
        assert "one dropped" in said[0]


def test_a_way_that_fails_with_messages_under_way_is_an_error(ranks1):
    assert ranks1.run(cases.fails_in_a_message) == ["planted in a run"]


def test_who_may_not_time_on_one_rank_times_on_none(ranks2):
    for name, source, runs, _, _ in chosen(ranks2, why_not=("", "TPKERNELS_TUNE=0")):
        assert (name, source, runs) == ("one", "not timed", UNTOUCHED)


def test_a_choice_is_kept_for_the_next_process(ranks2, tmp_path):
    chosen(ranks2, tmp_path)
    for name, source, runs, _, _ in chosen(ranks2, tmp_path):
        assert (name, source, runs) == ("memory", "cached", UNTOUCHED)


@pytest.mark.parametrize(
    ("cached", "name", "source"),
    {
        "the same": (("many", "many"), "many", "cached"),
        "others": (("many", "one"), "memory", "timed"),
        "one rank has none": (("many", ""), "memory", "timed"),
        "a way that is gone": (("pigeons", "pigeons"), "memory", "timed"),
    }.values(),
)
def test_caches_that_differ_make_no_difference_between_ranks(ranks2, tmp_path, cached, name, source):
    for found in chosen(ranks2, tmp_path, cached=cached):
        assert found[:2] == (name, source)


def test_a_cached_way_that_no_longer_opens_is_the_default_on_all(ranks2, tmp_path):
    found = chosen(ranks2, tmp_path, broken={"memory": "cannot open"}, cached=("memory",) * 2)
    for name, source, _, closed, said in found:
        assert (name, source, closed, len(said)) == ("one", "not timed", ["memory"], 1)


def test_defaults_that_differ_are_those_of_the_first_rank(ranks2):
    for name, *_ in chosen(ranks2, default=("many", "one"), why_not=("no", "")):
        assert name == "many"


FAST = {"1 collective": 3.0, "2 collectives": 2.0, "symmetric": 1.0}


def test_ops_take_what_was_fastest_and_time_it_once(ranks2):
    for off, first, second, opened in ranks2.run(cases.block_by, FAST):
        assert off < 1e-6
        assert all(": symmetric (timed: symmetric 1 ms, " in line for line in first)
        assert second == 0
        assert len(first) == len(set(first)) == 5  # two gathers forward, and one backward; two reduces
        assert opened == 2  # all of one shape
    slow = FAST | {"symmetric": 5.0}
    for off, first, second, opened in ranks2.run(cases.block_by, slow):
        assert off < 1e-6
        assert any(": 2 collectives (timed: " in line for line in first)
        assert (second, opened) == (0, 0)


def test_products_of_other_widths_decide_nothing_for_one_rank_alone(ranks2):
    assert ranks2.run(cases.weight_shards_that_differ) == [[True] * 4] * 2


def test_a_choice_against_memory_leaves_open_what_another_choice_took(ranks2):
    """With the group's time-out, and not that of trials."""
    for names, right, timeouts in ranks2.run(cases.memory_of_two_choices):
        assert (names, right) == (["SymmetricExchange", "Collectives"], True)
        assert timeouts == {40.0}


def test_without_symmetric_memory_on_one_rank_collectives_are_timed(ranks2):
    for off, first, _, opened in ranks2.run(cases.block_by, FAST, "no symmetric memory"):
        assert off < 1e-6
        assert any(": 2 collectives (timed: " in line for line in first)
        assert opened == 0


def test_nothing_is_timed_or_kept_while_a_graph_is_captured(ranks2):
    for off, first, second, opened in ranks2.run(cases.block_by, FAST, "capture"):
        assert off < 1e-6
        assert all("(not timed now: a graph is captured)" in line for line in first)
        assert second == len(first)
        assert opened == 0


def test_without_tuning_arithmetic_chooses_once(ranks2):
    for off, first, second, opened in ranks2.run(cases.block_by, FAST, "TUNE=0"):
        assert off < 1e-6
        assert all("(not timed: rank 0: TPKERNELS_TUNE=0)" in line for line in first)
        assert (second, opened) == (0, 0)


def test_numbers_that_overflow_decide_nothing():
    """In the first steps of fp16 the caller's own numbers do; what is left tells right from wrong."""
    expected = torch.tensor([1.0, float("inf"), float("nan"), 2.0])
    assert not _mismatch(torch.tensor([1.0, float("nan"), 3.0, 2.0]), expected)
    assert "off by" in _mismatch(torch.tensor([1.0, float("inf"), float("nan"), 3.0]), expected)
    assert "off by" in _mismatch(torch.tensor([1.0, 0.0, 0.0, float("nan")]), expected)


def test_a_stream_is_held_as_long_as_a_way_was_launched_before():
    """The time between its launch and what it was held for would count as time of the GPU."""
    stream = SimulatedStream()
    clock = StreamClock(StreamTimer(stream, stream.clock))
    way = stream.kernel(1.5, 1.6)
    first, *later = [clock("long", way) for _ in range(3)]
    assert first > 1.9
    assert later == pytest.approx([1.6, 1.6])
    assert stream.held == pytest.approx([2 * least + SLACK for least in (0.5, 1.5, 1.5)])


def test_ways_that_are_launched_quickly_are_held_for_one_time_on_all_ranks():
    """A rank whose stream begins earlier would wait for the others, and count that."""
    stream = SimulatedStream()
    clock = StreamClock(StreamTimer(stream, stream.clock))
    for on_host in (0.05, 0.2, 0.45):
        assert [clock("way", stream.kernel(on_host, 0.6)) for _ in range(3)] == pytest.approx([0.6] * 3)
    assert stream.held == pytest.approx([2 * 0.5 + SLACK] * 9)
