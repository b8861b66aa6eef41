"""`parallelize(..., quantize=)`: products of split layers are in fp8, and all else is as it is without."""

from __future__ import annotations

import pytest

from tests.interop import quantizing_cases as cases
from tpkernels import Recipe

BLOCK = ["down", "gate", "out", "qkv", "up"]
TOY = [f"blocks.{number}.{name}" for number in range(2) for name in BLOCK]
LAYER = ["attention.k", "attention.out", "attention.q", "attention.v", "mlp.down", "mlp.up"]
STACK = [f"layers.{number}.{name}" for number in range(2) for name in LAYER]


def check(found, names):
    assert found["names"] == names
    assert found["said"] == len(names)
    assert found["weights"] == []
    assert found["emulated"] < 2e-3  # sums in another order; few roundings to fp8 then go the other way
    assert 5e-3 < found["unquantized"] < 0.1
    assert found["gradient"] < (0.5, "")


def test_it_is_the_unsharded_model_with_the_same_products(ranks2):
    for found in ranks2.run(cases.of_toy, Recipe.rowwise()):
        check(found, TOY)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["all_tokens", "own_tokens"])
def test_so_it_is_where_ranks_share_tokens(sequence_parallel, ranks2):
    for found in ranks2.run(cases.of_stack, Recipe.rowwise(), sequence_parallel):
        check(found, STACK)


def test_a_head_only_where_it_is_asked_for(ranks2):
    for found in ranks2.run(cases.of_toy, Recipe.rowwise(head=True)):
        check(found, [*TOY, "head"])
    expected = {
        "gathered": TOY,
        "asked for": [*TOY, "head"],
        "tied": TOY,
        "column": ["1"],
        "column, asked for": ["1", "2"],
    }
    for found in ranks2.run(cases.heads):
        assert {name: sorted(names) for name, names in found.items()} == expected


@pytest.mark.parametrize("recipe", [Recipe.rowwise(), Recipe.blockwise(head=True)], ids=str)
def test_parameters_may_be_dtensors(recipe, ranks2):
    for found in ranks2.run(cases.as_dtensors, recipe):
        assert found == {"logits": True, "blocks.0.down.weight": True}


def test_it_is_one_graph(ranks2):
    assert max(ranks2.run(cases.compiled, Recipe.rowwise(), timeout=180)) < 1e-2


def test_what_cannot_be_is_refused_on_all_ranks(ranks2):
    first, second = ranks2.run(cases.refusals)
    assert first == second
    expected = [
        ("TypeError", "parallelize: expected quantize=tpkernels.Recipe.rowwise(), .blockwise() or None"),
        ("ValueError", "quantize: expected a plan that splits linear layers besides the head"),
        ("ValueError", "quantize=Recipe(scaling='blocks'"),
        ("ValueError", "'blocks.0.down'"),  # the comparison without fp8 finds a wrong plan
        ("TypeError", "expected x in bfloat16, float16 or float32 with quantize, got torch.float64"),
    ]
    for (kind, text), (expected_kind, part) in zip(first, expected, strict=True):
        assert (kind, part in text) == (expected_kind, True), text
