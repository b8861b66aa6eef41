"""Ops over a group: unsharded numbers, whatever the number of ranks, the delays and the way."""

from __future__ import annotations

import runpy
from itertools import product

import pytest
import torch

from tests.ops import parallel_behaviour as behaviour
from tests.ops.parallel_cases import Setting, assert_within, run_all
from tests.patience import patient
from tests.products import once, pairwise
from tpkernels.ops.tensor_parallel import parallel

WORLDS = ["ranks1", "ranks2", "ranks4"]
ACTIVATIONS = {"column": [None, "gelu"], "row": [None], "mlp": ["gelu_tanh", "swiglu"]}


@pairwise(
    world=WORLDS,
    name=list(ACTIVATIONS),
    dtype=[torch.float32, torch.bfloat16, torch.float16, torch.float64],
)
def test_any_number_of_ranks_gives_the_unsharded_numbers(ranks, name, dtype):
    settings = [
        Setting(dtype, sequence_parallel, overlap, activation=activation, main_grad=main_grad)
        for sequence_parallel, overlap, main_grad, activation in product(
            [False, True], [False, True], [False, True], ACTIVATIONS[name]
        )
        if not (main_grad and dtype is torch.float64)
    ]
    if dtype.itemsize == 2:
        settings.append(Setting(dtype, activation=ACTIVATIONS[name][-1], main_grad="of the weight's dtype"))
    assert_within(ranks.run(run_all, name, settings), settings)


@once(world=WORLDS, name=list(ACTIVATIONS))
def test_leading_dimensions_are_any(ranks, name):
    activation = ACTIVATIONS[name][-1]
    settings = [
        Setting(leading=leading, activation=activation, small_pieces=small)
        for leading in ((8, 3), (4, 2, 2), (12, 1), (0,), (8, 0))
        for small in (False, True)
    ]
    settings += [
        Setting(leading=leading, activation=activation, sequence_parallel=False)
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


def test_a_doubled_bias_would_be_seen(ranks2):
    assert min(ranks2.run(behaviour.doubled_bias)) > 1000


@pytest.mark.parametrize("world", ["ranks2", "ranks4"])
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_delays_change_no_bit(ranks, sequence_parallel):
    assert all(ranks.run(behaviour.repeats_are_equal, sequence_parallel))


@pytest.mark.parametrize("world", ["ranks2", "ranks4"])
def test_both_ways_to_all_reduce_sum_in_the_order_of_ranks(ranks):
    for wrong in ranks.run(behaviour.wrong_all_reduces, [torch.float32, torch.bfloat16, torch.float64]):
        assert not wrong


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_around_it(ranks2, reentrant):
    assert ranks2.run(behaviour.checkpointed_unlike_plain, reentrant) == [[], []]


def test_forward_without_gradients_has_the_same_bits(ranks2):
    assert ranks2.run(behaviour.unlike_with_grad) == [[], []]


def test_interleaved_layers_do_not_mix(ranks2):
    assert all(ranks2.run(behaviour.interleaved_layers_do_not_mix))


def test_several_weights_share_one_gather(ranks2):
    assert ranks2.run(behaviour.lists_share_one_gather) == [(True, 0)] * 2


MISTAKES = {
    "ragged tokens": "divisible by the 2 ranks",
    "no group": "expected a process group",
    "width": "expected x (..., in_features)",
    "dtype": "expected one dtype",
    "no tokens": "expected x (tokens, ..., in_features)",
    "lists": "as many of bias_shard as of weight_shard",
    "main_grad": "expected main_grad (8, 8)",
    "elsewhere": "ValueError: row_linear: expected tensors on cpu",
    "gated bias": "a gated unit has no biases",
}


def test_mistakes_are_errors_on_every_rank(ranks2):
    for messages in ranks2.run(behaviour.bad_calls):
        assert {name: words for name, words in MISTAKES.items() if words not in messages[name]} == {}, (
            messages
        )


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
def test_a_debug_mode_that_is_neither_on_nor_off_is_refused(monkeypatch):
    monkeypatch.setenv("TPKERNELS_DEBUG", "yes")
    with pytest.raises(ValueError, match="TPKERNELS_DEBUG is 'yes'; expected 0 or 1"):
        runpy.run_module(parallel.__name__)  # what is read once, as at the first import


def test_a_late_rank_is_an_error_that_names_op_and_peer(ranks2):
    message, late = ranks2.run(behaviour.peer_stays_away, patient(1.0))
    assert late == "late"
    assert "column_linear: rows of rank 1 " in message
    assert "did not arrive" in message
