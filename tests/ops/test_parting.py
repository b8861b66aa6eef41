"""Ranks that part ways: calls that end half-way, calls that differ, groups that nobody may use any more."""

from __future__ import annotations

import pytest
import torch

from tests.ops import parting_cases as cases
from tests.ranks import RankFailure, RankPool

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="failures are planted among operators of the CPU"
)

FIRST_CAUSE = "MemoryError: planted"


def assert_all_are_told(answers: list[list[tuple[int, str, str]]], failing: int) -> None:
    """Of the first cause, in the step after; or all are right, as the failure came behind the last call."""
    told = 0
    for points in zip(*answers, strict=True):
        assert points[failing][1] == FIRST_CAUSE
        after = [said for _, _, said in points]
        if after != ["no error"] * len(points):
            assert all(FIRST_CAUSE in said or "left the common order of calls" in said for said in after), (
                points
            )
            told += 1
    assert told >= len(answers[0]) // 2, answers


@pytest.mark.parametrize("name", list(cases.STEPS))
@pytest.mark.parametrize("transport", ["c10d", "shared"])
def test_a_call_that_ends_half_way_is_an_error_of_every_later_call_on_every_rank(ranks2, name, transport):
    assert_all_are_told(ranks2.run(cases.interrupted, name, transport, 0, 4), 0)


@pytest.mark.parametrize("transport", ["c10d", "shared"])
def test_a_call_that_ends_half_way_is_told_to_four_ranks(ranks4, transport):
    assert_all_are_told(ranks4.run(cases.interrupted, "mlp", transport, 2, 3), 2)


def test_other_groups_go_on_after_one_has_failed(ranks2):
    assert ranks2.run(cases.failed_group_is_one_of_many, ["c10d", "shared"]) == [[True, True]] * 2


@pytest.mark.parametrize("transport", ["c10d", "shared"])
@pytest.mark.parametrize(
    "how",
    [
        "x needs a gradient",
        "the weight needs a gradient",
        "save_gathered",
        "rows",
        "dtype",
        "ops",
        "label_smoothing",
        "ignore_index",
        "vocab_size",
    ],
)
def test_ranks_that_ask_for_different_things_are_told_and_live_on(ranks2, transport, how):
    for message, seconds in ranks2.run(cases.different, how, transport):
        assert "Error: " in message, message
        assert seconds < 30


def test_without_tags_that_tell_calls_apart_the_fault_shows():
    with RankPool(2) as own:
        try:
            messages = own.run(cases.watched_without_tags_that_tell)
        except RankFailure:  # gloo has aborted a rank
            return
    assert not all("have left the common order" in message for message in messages)


@pytest.mark.parametrize("transport", ["c10d", "shared"])
def test_ranks_that_are_slow_are_left_alone(ranks2, transport):
    assert ranks2.run(cases.slow_is_not_wrong, transport) == [True] * 2


@pytest.mark.parametrize(
    "how",
    [
        "requires_grad",
        "activation",
        "sequence_parallel",
        "autocast",
        "backward",
        "ignore_index",
        "label_smoothing",
        "vocab_size",
        "chunk_tokens",
        "rows",
    ],
)
def test_debug_mode_compares_all_that_ranks_ask_for(ranks2, how):
    for (message,) in ranks2.run(cases.compared, how, False):
        assert "ranks disagree on tensor" in message, message


@pytest.mark.parametrize("how", ["rows", "sequence_parallel", "label_smoothing"])
def test_a_backend_without_tags_compares_calls_that_are_new(ranks2, how):
    for (message,) in ranks2.run(cases.compared, how, True):
        assert "ranks disagree" in message, message


def test_a_group_that_was_destroyed_is_refused_by_all_that_take_one(ranks2):
    for messages in ranks2.run(cases.destroyed):
        for message in messages:
            assert "was destroyed" in message, messages


def test_a_forked_child_may_not_use_the_groups_of_its_parent(ranks2):
    for messages in ranks2.run(cases.in_a_fork):
        assert len(messages) == 2
        for message in messages:
            assert "make process groups after the fork" in message, messages


def test_a_rank_that_cannot_open_an_exchange_tells_all(ranks2):
    for during, after, seconds in ranks2.run(cases.interrupted_while_opening):
        assert "rank 0 cannot take part: MemoryError: planted" in during
        assert after == "no error"  # all refused alike: nothing was on its way
        assert seconds < 20


def test_an_interruption_while_ranks_compare_ends_the_group(ranks2):
    for rank, (during, after) in enumerate(ranks2.run(cases.interrupted_while_agreeing)):
        assert during.startswith("KeyboardInterrupt" if rank == 0 else "RuntimeError"), during
        assert "has failed and cannot be used any more: rank 0: KeyboardInterrupt" in after


def test_a_group_that_fails_wakes_ranks_also_where_others_have_failed_before(ranks4):
    assert max(ranks4.run(cases.woken_by_a_rank_whose_neighbour_is_gone)) < 15
