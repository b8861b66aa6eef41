"""Ops in fp8 over ranks: numbers of the definition whatever the way, bytes that travel."""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest
import torch

from bench.cases.scaled_ranks import apart_from_one_rank, bytes_of
from tests.ops import quantized_cases as cases
from tests.ops.parallel_cases import Setting
from tests.ops.quantized_oracle import RECIPES
from tests.ops.transport_cases import under
from tests.ranks import RankPool
from tpkernels import Recipe

SOME = ["rowwise", "rowwise, wgrad fp8, e5m2", "blockwise", "blockwise, power of two, e5m2"]
FEATURES = (256, 512)  # blocks and shards have no common border: at 2 ranks some, at 4 others


@pytest.fixture(params=["ranks1", "ranks2", "ranks4"])
def ranks(request: pytest.FixtureRequest) -> RankPool:
    pool: RankPool = request.getfixturevalue(request.param)
    return pool


def check(ranks: RankPool, name: str, settings: list[tuple[Setting, str]]) -> None:
    by_rank = ranks.run(cases.run_all, name, settings)
    for number, setting in enumerate(settings):
        for rank, results in enumerate(by_rank):
            too_far = {key: value for key, value in results[number].items() if not value < 1}
            assert not too_far, f"rank {rank}, {setting}: error as a part of what is allowed: {too_far}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["column", "row"])
def test_any_number_of_ranks_gives_the_numbers_of_the_definition(ranks, name, dtype):
    flags = product([False, True], [False, True], [False, True])
    check(
        ranks,
        name,
        [
            (Setting(dtype, parallel, overlap, main_grad=main_grad, features=FEATURES), SOME[i % len(SOME)])
            for i, (parallel, overlap, main_grad) in enumerate(flags)
        ],
    )


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["column", "row"])
def test_each_recipe_over_ranks(ranks2, name, recipe):
    settings = [
        Setting(torch.bfloat16, features=FEATURES, activation="gelu" if name == "column" else None),
        Setting(torch.bfloat16, features=FEATURES, save_gathered=True),
        Setting(torch.bfloat16, features=(200, 72), sequence_parallel=False),
    ]
    check(ranks2, name, [(setting, recipe) for setting in settings])


@pytest.mark.parametrize("name", ["column", "row"])
def test_leading_dimensions_are_any(ranks2, name):
    settings = [
        Setting(leading=leading, features=FEATURES, sequence_parallel=parallel)
        for leading in ((8, 3), (4, 2, 2), (0,), (8, 0), (2,))
        for parallel in (True, False)
    ] + [Setting(leading=(7,), features=FEATURES, sequence_parallel=False)]
    check(ranks2, name, [(setting, SOME[i % 3]) for i, setting in enumerate(settings)])


@pytest.mark.parametrize("fault", ["doubled bias", "swapped rank", "wrong scale"])
def test_a_fault_would_be_seen(ranks2, fault):
    assert min(ranks2.run(cases.planted, fault)) > 5


@pytest.mark.parametrize("activation", ["gelu_tanh", "swiglu"])
@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_parallel_mlp_has_the_bits_of_its_parts(ranks2, recipe, activation):
    """In fp32: in 16 bits the parts round what lies between them, an MLP does not."""
    for parallel, overlap in product([True, False], [True, False]):
        setting = Setting(
            torch.float32, parallel, overlap, activation=activation, features=(64, 96), small_pieces=False
        )
        assert ranks2.run(cases.mlp_unlike_its_parts, setting, recipe) == [[], []]


@pytest.mark.parametrize("recipe", ["rowwise, power of two", "blockwise, power of two, e5m2"])
def test_what_fp8_holds_has_the_same_bits_on_any_number_of_ranks(ranks, recipe):
    for wrong in ranks.run(cases.unlike_unsharded, recipe):
        assert wrong == []


@pytest.mark.parametrize("ranks", ["ranks2", "ranks4"], indirect=True)
def test_words_do_not_depend_on_the_number_of_ranks(ranks):
    for found in ranks.run(cases.words_of_shards_are_shards_of_words):
        assert all(found)


@pytest.mark.parametrize("ranks", ["ranks2", "ranks4"], indirect=True)
@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_operands_that_lie_within_ranks_are_those_of_one_rank(ranks, recipe):
    """x and rows of the weight in column forward, dy and columns of the weight in row backward; dw exactly.

    Others have scales of shards, unless blocks and shards have common borders: then only what ranks send each
    other is rounded. Figures are in docs/fp8.md.
    """
    for found in ranks.run(apart_from_one_rank, RECIPES[recipe]):
        assert found["column dw"] == found["row dw"] == 0
        assert found["column y"] < 1e-4  # sums in fp32 in another order
        assert found["row dx"] < 1e-4
        least, most = (0.02, 0.06) if recipe == "rowwise" else (0.001, 0.005)
        assert least < found["row y"] < most
        assert least < found["column dx"] < most


def test_other_transports_give_the_same_bits(ranks2, ranks4):
    for pool in (ranks2, ranks4):
        for changed in pool.run(cases.transports_change, ["c10d", "shared"]):
            assert changed == {"c10d": False, "shared": False}


# fp8 rows with their scales, to 16 bits
AT_MOST = {64: 0.532, 256: 0.516, 1024: 0.516, 4096: 0.516}


@pytest.mark.parametrize("hidden", AT_MOST)
@pytest.mark.parametrize("transport", ["c10d", "shared"])
def test_gathers_send_half_the_bytes_and_sums_send_the_same(ranks2, transport, hidden):
    sent_by = partial(ranks2.run, under, transport, "torch", bytes_of, hidden)
    plain = sent_by(None)
    for recipe in (Recipe.rowwise(), Recipe.blockwise()):
        for ours, theirs in zip(sent_by(recipe), plain, strict=True):
            for name, sent in ours.items():
                assert theirs[name] > 0, name
                if "gather" in name:
                    assert sent / theirs[name] <= AT_MOST[hidden], name
                else:
                    assert sent == theirs[name], name
