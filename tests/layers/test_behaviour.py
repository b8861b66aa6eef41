"""Layers as citizens of PyTorch: compile, autocast, checkpoints, accumulation, frozen and tied weights."""

from __future__ import annotations

import pytest

from tests.layers import behaviour


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_compiled_layers_compute_the_same(ranks2, sequence_parallel):
    assert all(ranks2.run(behaviour.compiled_equals_eager, sequence_parallel, timeout=180))


@pytest.mark.parametrize(
    "function",
    [
        behaviour.compiled_ends_equal_eager,
        behaviour.checkpointed_equals_plain,
        behaviour.accumulates,
        behaviour.without_gradients,
        behaviour.autocast_is_bfloat16,
        behaviour.frozen_weights,
        behaviour.tied_head,
        behaviour.buckets_take_fused_gradients,
        behaviour.buckets_take_fused_gradients_of_compiled_layers,
        behaviour.tied_weights_keep_both_gradients,
    ],
    ids=lambda function: function.__name__,
)
def test_layers_behave(ranks2, function):
    assert all(ranks2.run(function))


def test_fusion_follows_megatrons_protocol(ranks2):
    assert ranks2.run(behaviour.fusion_follows_the_protocol) == [[], []]


def test_layers_take_groups_of_any_kind(ranks4):
    assert ranks4.run(behaviour.groups_of_any_kind) == [[]] * 4


def test_seed_gives_the_same_model_in_a_row_of_layers(ranks4):
    assert all(ranks4.run(behaviour.weights_agree, 3))


def test_mistakes_are_the_same_on_all_ranks_before_anything_moves(ranks2):
    first, second = ranks2.run(behaviour.mistakes)
    assert first == second
    *said, (_, sent) = first
    assert sent == "0"
    assert [kind for kind, _ in said] == [
        "InvalidSizes",
        "ValueError",
        "ValueError",
        "ValueError",
        "ValueError",
        "ValueError",
        "TypeError",
        "ValueError",
    ]
