"""Ops over a group: unsharded numbers, whatever the number of ranks, the delays and the way."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product

import pytest
import torch

from tests.ops import parallel_behaviour as behaviour
from tests.ops.parallel_cases import Setting, run_all
from tests.ops.parallel_compile import compiled_against_eager
from tests.ranks import RankFailure, RankPool

WORLDS = ["ranks1", "ranks2", "ranks4"]
ACTIVATIONS = {"column": [None, "gelu"], "row": [None], "mlp": ["gelu_tanh", "swiglu"]}


@pytest.fixture(params=WORLDS)
def ranks(request: pytest.FixtureRequest) -> RankPool:
    pool: RankPool = request.getfixturevalue(request.param)
    return pool


def check(ranks: RankPool, name: str, settings: list[Setting]) -> None:
    by_rank = ranks.run(run_all, name, [(setting, seed) for seed, setting in enumerate(settings)])
    for number, setting in enumerate(settings):
        for rank, results in enumerate(by_rank):
            too_far = {key: value for key, value in results[number].items() if not value < 1}
            assert not too_far, f"rank {rank}, {setting}: error as a part of what is allowed: {too_far}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["column", "row", "mlp"])
def test_any_number_of_ranks_gives_the_unsharded_numbers(ranks, name, dtype):
    flags = product([False, True], [False, True], [False, True], ACTIVATIONS[name])
    check(
        ranks,
        name,
        [
            Setting(dtype, parallel, overlap, activation=activation, main_grad=main_grad)
            for parallel, overlap, main_grad, activation in flags
            if not (main_grad and dtype is torch.float64)
        ],
    )


@pytest.mark.parametrize("name", ["column", "row", "mlp"])
def test_leading_dimensions_are_any(ranks, name):
    activation = ACTIVATIONS[name][-1]
    check(
        ranks,
        name,
        [
            Setting(leading=leading, activation=activation, small_pieces=small)
            for leading in ((8, 3), (4, 2, 2), (12, 1), (0,), (8, 0))
            for small in (False, True)
        ]
        + [
            Setting(leading=leading, activation=activation, sequence_parallel=False)
            for leading in ((), (1,), (7,), (3, 5), (0,))
        ],
    )


def test_options_of_column(ranks):
    check(
        ranks,
        "column",
        [
            Setting(bias=False),
            Setting(save_gathered=True, activation="relu2"),
            Setting(save_gathered=True, sequence_parallel=False),
            Setting(features=(7, 12), activation="silu"),
        ],
    )


def test_a_doubled_bias_would_be_seen(ranks2):
    assert min(ranks2.run(behaviour.doubled_bias)) > 1000


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("ranks", ["ranks2", "ranks4"], indirect=True)
def test_delays_change_no_bit(ranks, sequence_parallel):
    assert all(ranks.run(behaviour.repeats_are_equal, sequence_parallel))


@pytest.mark.parametrize("ranks", ["ranks2", "ranks4"], indirect=True)
def test_both_ways_to_all_reduce_sum_in_the_order_of_ranks(ranks):
    for wrong in ranks.run(behaviour.wrong_all_reduces, [torch.float32, torch.bfloat16, torch.float64]):
        assert not wrong


def test_overlap_changes_rounding_only(ranks4):
    assert max(ranks4.run(behaviour.overlap_changes_rounding_only)) < 1e-6


def test_interleaved_layers_do_not_mix(ranks2):
    assert all(ranks2.run(behaviour.interleaved_layers_do_not_mix))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_around_it(ranks2, reentrant):
    assert all(ranks2.run(behaviour.checkpointed_equals_plain, reentrant))


def test_forward_without_grad(ranks2):
    assert all(ranks2.run(behaviour.without_grad))


def test_several_weights_share_one_gather(ranks2):
    for same, more_transfers in ranks2.run(behaviour.lists_share_one_gather):
        assert same
        assert more_transfers == 0


def test_a_rank_alone_touches_no_transfer():
    with RankPool(1) as own:  # patched for good, hence not the common one
        assert own.run(behaviour.a_rank_alone_touches_no_transfer) == [True]


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_compiled_gives_the_same_bits(ranks2, sequence_parallel):
    setting = Setting(sequence_parallel=sequence_parallel, activation="gelu")
    for same in ranks2.run(compiled_against_eager, setting, (8, 16, 24), timeout=180):
        assert same == [True] * 3


@pytest.mark.parametrize(
    ("name", "words"),
    {
        "ragged tokens": "divisible by the 2 ranks",
        "no group": "expected a process group",
        "width": "expected x (..., in_features)",
        "dtype": "expected one dtype",
        "no tokens": "expected x (tokens, ..., in_features)",
        "lists": "as many of bias_shard as of weight_shard",
        "main_grad": "expected main_grad (8, 8)",
        "elsewhere": "ValueError: row_linear: expected tensors on cpu",
        "gated bias": "a gated unit has no biases",
    }.items(),
)
def test_mistakes_are_errors_on_every_rank(ranks2, name, words):
    for message in ranks2.run(behaviour.bad_call, name):
        assert words in message


def test_other_shapes_are_an_error_on_every_rank_in_debug_mode(ranks2):
    for message in ranks2.run(behaviour.other_shape_in_debug):
        assert "ranks disagree" in message
        assert "(4, 8)" in message
        assert "(6, 8)" in message


def test_a_debug_mode_that_is_neither_on_nor_off_is_refused():
    imported = subprocess.run(
        [sys.executable, "-c", "import tpkernels.ops"],
        env={**os.environ, "TPKERNELS_DEBUG": "yes"},
        capture_output=True,
        text=True,
    )
    assert "ValueError: TPKERNELS_DEBUG is 'yes'; expected 0 or 1" in imported.stderr


def test_a_dead_rank_is_an_error_that_names_op_and_peer():
    with RankPool(2) as own, pytest.raises(RankFailure) as failure:
        own.run(behaviour.peer_dies)
    survivor = str(failure.value.exceptions[0])
    assert survivor.startswith("column_linear: ")
    assert "rank 1" in survivor


def test_a_late_rank_is_an_error_that_names_op_and_peer(ranks2):
    message, late = ranks2.run(behaviour.peer_stays_away, 2.0)
    assert late == "late"
    assert "column_linear: rows of rank 1 " in message
    assert "did not arrive" in message
