"""Ops in fp8 over ranks as citizens of PyTorch: compile, checkpoint, main_grad, ranks that disagree."""

from __future__ import annotations

from functools import partial

import pytest

from tests.ops import parallel_compile
from tests.ops import quantized_behaviour as behaviour
from tpkernels import Recipe

RECIPES = [Recipe.rowwise(), Recipe.blockwise()]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_around_it(ranks2, reentrant):
    assert ranks2.run(behaviour.checkpointed_unlike_plain, reentrant) == [[], []]


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_forward_without_gradients_has_the_same_bits(ranks2, recipe):
    assert ranks2.run(behaviour.unlike_with_grad, recipe) == [[], []]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_operators_pass_opcheck(ranks2, sequence_parallel):
    assert ranks2.run(behaviour.operators_pass_opcheck, sequence_parallel, timeout=180) == [[], []]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_compiled_ops_save_and_compute_what_eager_ones_do(ranks2, sequence_parallel):
    options = {"sequence_parallel": sequence_parallel, "quantize": Recipe.rowwise(wgrad="fp8")}
    cases = [
        ("columns", {"activation": "gelu", "save_gathered": True, **options}),
        ("row", options),
        ("mlp", {"gated": False, **options}),
        ("mlp", {"gated": True, **options, "quantize": Recipe.blockwise()}),
    ]
    assert ranks2.run(behaviour.unlike_compiled, cases, timeout=180) == [[], []]


def test_main_grads_take_under_compile_what_they_take_eagerly(ranks2):
    models = [behaviour.two_operators, behaviour.one_operator]
    run = partial(parallel_compile.main_grads_under_compile, "aot_eager", models, [False, True])
    assert ranks2.run(run, timeout=300) == [[], []]


def test_marked_weights_take_main_grads(ranks2):
    assert ranks2.run(behaviour.marked_weights_take_main_grads) == [[], []]


@pytest.mark.parametrize("world", ["ranks1", "ranks2"])
def test_mistakes_are_errors_on_every_rank_before_anything_travels(request, world):
    for found in request.getfixturevalue(world).run(behaviour.refusals):
        assert found.keys() == behaviour.REFUSED.keys()
        for name, words in behaviour.REFUSED.items():
            assert words in found[name], name


PAIRS = [("rowwise", "blockwise"), ("plain", "rowwise"), ("rowwise", "e5m2")]


@pytest.mark.parametrize("recipes", PAIRS, ids="-".join)
def test_ranks_with_other_recipes_are_told_so_in_debug_mode(ranks2, recipes):
    for message in ranks2.run(behaviour.other_recipes, True, recipes):
        assert "ranks disagree" in message
        assert "options: " in message
        assert "Recipe(scaling='rows'" in message


@pytest.mark.parametrize("recipes", PAIRS, ids="-".join)
def test_ranks_with_other_recipes_are_told_of_other_calls_without_it(ranks2, recipes):
    """No rank takes another's words for its own kind, also where they are as many."""
    told = ("it sent rows of another call", "expected equal arguments on all ranks")
    for message in ranks2.run(behaviour.other_recipes, False, recipes):
        assert any(words in message for words in told), message


def test_ranks_that_want_other_gradients_are_told_so_in_debug_mode(ranks2):
    for message in ranks2.run(behaviour.other_gradients_in_debug):
        assert "parallel_mlp backward: ranks disagree" in message


def test_one_rank_touches_nobody(ranks1):
    (same,) = ranks1.run(behaviour.one_rank_touches_nobody)
    assert same == [True] * 4


@pytest.mark.parametrize("reusing", [False, True], ids=["anew", "reused"])
def test_fully_sharded_weights_have_the_losses_of_full_ones(ranks2, reusing):
    """Their gathers rewrite storages and count no version: a weight of the step before would show."""
    full = ranks2.run(behaviour.losses, False, False)[0]
    assert len(set(full)) == 3
    for found in ranks2.run(behaviour.losses, True, reusing):
        assert found == pytest.approx(full, rel=1e-5)
