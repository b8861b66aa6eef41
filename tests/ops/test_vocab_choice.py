"""Ids chosen by split logits: those of the whole, on all ranks, for any number of them."""

from __future__ import annotations

import pytest
import torch

from tests.ops import choice_cases as cases

DTYPES = [torch.float32, torch.bfloat16, torch.float64]
WORLDS = ["ranks1", "ranks2", "ranks4"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_argmax_is_the_lowest_id_of_the_largest_logit(request, dtype):
    for world in WORLDS:
        for ours, whole in request.getfixturevalue(world).run(cases.argmax_of, dtype):
            assert torch.equal(ours, whole)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_samples_are_those_drawn_by_hand(request, dtype):
    """Logits are quarters, so that many tie."""
    for world in WORLDS:
        for found in request.getfixturevalue(world).run(cases.samples, dtype):
            for options, (ours, by_hand) in zip(cases.OPTIONS, found, strict=True):
                assert ours.tolist() == by_hand, options


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_samples_do_not_depend_on_the_number_of_ranks(request, dtype):
    by_world = [request.getfixturevalue(world).run(cases.real_samples, dtype) for world in WORLDS]
    ((alone,), *_) = by_world
    for by_rank in by_world:
        for drawn in by_rank:
            assert all(torch.equal(a, b) for a, b in zip(drawn, alone, strict=True))


def test_samples_are_as_frequent_as_they_are_probable(ranks2):
    probable = torch.tensor([2.0, 1.0, 0.0, -1.0, -torch.inf, 1.5]).softmax(0)
    for frequent in ranks2.run(cases.frequencies, 20_000):
        assert frequent[4] == 0
        torch.testing.assert_close(frequent, probable, rtol=0, atol=0.015)  # four standard deviations


def test_leading_dimensions_are_any(ranks2):
    leading = [(), (0,), (2, 0), (2, 3, 1)]
    for found in ranks2.run(cases.shapes):
        assert found == [shape for rows in leading for shape in (rows, rows, (*rows, cases.VOCAB))]


@pytest.mark.parametrize("world", WORLDS)
def test_gather_brings_all_logits_and_takes_each_part_of_the_gradient(request, world):
    assert all(request.getfixturevalue(world).run(cases.gathered))


def test_mistakes_of_choosing_are_errors_on_every_rank(ranks2):
    for messages in ranks2.run(cases.mistakes):
        for message, words in zip(
            messages,
            [
                "expected a finite temperature above 0, got 0.0; use vocab_argmax",
                "expected a finite temperature above 0, got inf",
                "expected top_k of at least 1, got 0",
                "expected top_p above 0 and at most 1, got 0.0",
                "expected top_p above 0 and at most 1, got 1.5",
                "expected uniform (3,) on cpu, got (4,)",
                "expected floating-point logits_shard",
                "expected a vocab_size from 1 to 8",
            ],
            strict=True,
        ):
            assert words in message
