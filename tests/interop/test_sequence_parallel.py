"""Models of torch's own layers whose ranks share tokens between modules compute what they do unsharded."""

from __future__ import annotations

import pytest

from tests.interop import sequence_cases as cases

HOW = ["plain", "checkpointed", "reentrant", "compiled", "copied", "pickled"]


@pytest.mark.parametrize(
    ("kind", "how"), [*(("gpt", how) for how in HOW), ("direct", "plain"), ("mixture", "plain")]
)
def test_it_trains_as_the_unsharded_model_does(kind, how, ranks2):
    assert ranks2.run(cases.trained_alike, kind, how) == [[], []]


@pytest.mark.parametrize("unlike", [cases.trained_alike, cases.under_fsdp])
def test_it_does_so_on_four_ranks(unlike, ranks4):
    assert ranks4.run(unlike) == [[]] * 4


def test_gradients_in_eval_mode_of_any_number_of_tokens(ranks2):
    assert ranks2.run(cases.odd_gradients) == [[], []]


def test_modules_with_more_than_columns_and_rows_compute_as_before(ranks2):
    attention = {f"layers.{i}.attention": tuple(f"layers.{i}.attention.{n}" for n in "qkv") for i in (0, 1)}
    mlp = {f"layers.{i}.mlp": (f"layers.{i}.mlp.up",) for i in (0, 1)}
    columns, whole = [attention | mlp, attention, attention], [(), tuple(mlp), tuple(mlp)]
    assert ranks2.run(cases.forms) == [{"columns": columns, "whole": whole}] * 2


def test_it_saves_memory_and_transfers(ranks2):
    for found in ranks2.run(cases.costs):
        (saved, sent), (shared_saved, shared_sent) = found["plain"], found["shared"]
        assert shared_saved < 0.85 * saved
        assert shared_sent < 0.95 * sent


@pytest.mark.parametrize("refusals", [cases.refusals, cases.faults_seen])
def test_what_cannot_share_tokens_is_refused_on_all_ranks_alike(refusals, ranks2):
    first, second = ranks2.run(refusals)
    assert first == second
