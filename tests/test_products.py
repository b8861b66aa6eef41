"""Which combinations of a product are run."""

import itertools

import pytest

from tests import products
from tests.products import covering, once, paired, pairwise

SIZES = [(3, 4), (2, 3, 4), (4, 6, 3, 2), (1, 5), (7,)]


@pytest.mark.parametrize("sizes", SIZES)
def test_pairwise_leaves_no_pair_out(sizes):
    cover = covering(sizes, 2)
    for one, other in itertools.combinations(range(len(sizes)), 2):
        met = {(combination[one], combination[other]) for combination in cover}
        assert met == set(itertools.product(range(sizes[one]), range(sizes[other])))


@pytest.mark.parametrize("sizes", SIZES)
def test_once_leaves_no_value_out_and_takes_no_more_than_it_must(sizes):
    cover = covering(sizes, 1)
    assert [set(values) for values in zip(*cover, strict=True)] == [set(range(size)) for size in sizes]
    assert len(cover) == max(sizes)


def test_pairs_in_a_body_are_all_there():
    axes = "ab", (1, 2, 3), (False, True)
    for one, other in itertools.combinations(range(3), 2):
        met = {(combination[one], combination[other]) for combination in paired(*axes)}
        assert met == set(itertools.product(axes[one], axes[other]))


def test_pairs_take_a_fraction_of_the_product():
    assert len(covering((4, 6, 3, 2), 2)) <= 27  # of 144; no fewer than 24 can do


@pytest.mark.parametrize("decorator", [once, pairwise])
def test_sweep_runs_the_rest_and_only_that(decorator, monkeypatch):
    axes = {"shape": {"small": 1, "large": 100}, "dtype": ["fp32", "bf16"], "bias": [False, True]}
    runs = []
    for sweep in (False, True):
        monkeypatch.setattr(products, "SWEEP", sweep)
        names, params = decorator(**axes).args
        assert names == ["shape", "dtype", "bias"]
        assert all(bool(param.marks) is sweep for param in params)
        runs.append([param.values for param in params])
    assert sorted(runs[0] + runs[1]) == sorted(itertools.product((1, 100), ("fp32", "bf16"), (False, True)))


def test_ids_are_keys_and_names():
    assert [param.id for param in once(shape={"small": 1}, activation=[len, "relu"]).args[1]] == [
        "small-len",
        "small-relu",
    ]
