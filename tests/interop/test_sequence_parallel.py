"""Models of torch's own layers whose ranks share tokens between modules compute what they do unsharded."""

from __future__ import annotations

import pytest

from tests.interop import sequence_cases as cases


@pytest.mark.parametrize("kind", ["gpt", "direct", "mixture"])
def test_it_trains_as_the_unsharded_model_does(kind, ranks2):
    assert ranks2.run(cases.trained_alike, kind) == [[], []]


@pytest.mark.parametrize("how", ["checkpointed", "reentrant", "compiled", "copied", "pickled"])
def test_it_does_so_however_it_is_used(how, ranks2):
    assert ranks2.run(cases.trained_alike, "gpt", how) == [[], []]


def test_four_ranks(ranks4):
    assert ranks4.run(cases.trained_alike, "gpt") == [[]] * 4


def test_fsdp(ranks4):
    assert ranks4.run(cases.under_fsdp) == [[]] * 4


def test_gradients_in_eval_mode_of_any_number_of_tokens(ranks2):
    assert ranks2.run(cases.odd_gradients) == [[], []]


def test_modules_with_more_than_columns_and_rows_compute_as_before(ranks2):
    first, second = ranks2.run(cases.forms)
    assert first == second
    attention = {f"layers.{i}.attention": tuple(f"layers.{i}.attention.{n}" for n in "qkv") for i in (0, 1)}
    mlp = {f"layers.{i}.mlp": (f"layers.{i}.mlp.up",) for i in (0, 1)}
    assert first == {
        "columns": [attention | mlp, attention, attention],
        "whole": [(), tuple(mlp), tuple(mlp)],
    }


def test_it_saves_memory_and_transfers(ranks2):
    for found in ranks2.run(cases.costs):
        (saved, sent), (shared_saved, shared_sent) = found["plain"], found["shared"]
        assert shared_saved < 0.85 * saved
        assert shared_sent < 0.95 * sent


def test_what_cannot_share_tokens_is_refused_on_all_ranks_alike(ranks2):
    first, second = ranks2.run(cases.refusals)
    assert first == second
    expected = {
        "dropout": "'layers.0.between' draws random numbers for hidden states",
        "convolution": "'layers.0.between.conv.weight' is in a layer, but not beside columns and rows",
        "mean": "sequence_parallel: the split model does not do what the unsharded one does",
        "backward": "expected one call of each of the layers 'layers.0' to 'layers.1', in this order",
        "twice": "expected layers of their own in 'layers', got one twice",
        "not tried": "sequence_parallel: expected a verify that is not False",
        "odd inputs": "a number of tokens that 2 ranks divide, for sequence_parallel, got 5 in 'layers.0'",
        "no list": "expected all columns and rows in layers of an nn.ModuleList, got '0'",
        "no columns": "expected columns and rows in one nn.ModuleList of layers, got none",
        "one rank asks": "ranks disagree",
        "odd tokens": "expected a number of tokens that the 2 ranks divide, got 5 in (2, 5, 16); pad",
    }
    for case, part in expected.items():
        assert (first[case][0], part in first[case][1]) == ("ValueError", True), first[case]
    assert first["half"][0] == "ValueError"
    assert first["afterwards"] == ("nothing", "[]")


def test_the_comparison_sees_faults(ranks2):
    for found in ranks2.run(cases.faults_seen):
        assert "sequence_parallel: the split model does not" in found["norms"]
        assert ".weight' is off by" in found["norms"]
        assert "off by" in found["sums"]
