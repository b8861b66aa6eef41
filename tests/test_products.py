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


AXES = {"shape": {"small": 1, "large": 100}, "dtype": ["fp32", "bf16"], "bias": [False, True]}
EVERYTHING = sorted(itertools.product((1, 100), ("fp32", "bf16"), (False, True)))


def params_of(decorator, *, takes_pairs=False):
    """What a test is parametrized by. takes_pairs: its body does"""

    def plain(shape, dtype, bias): ...

    def of_pairs(shape, dtype, bias, combined): ...

    (mark,) = decorator(of_pairs if takes_pairs else plain).pytestmark
    return mark.args


@pytest.mark.parametrize("decorator", [once, pairwise])
def test_sweep_runs_the_rest_and_only_that(decorator, monkeypatch):
    runs = []
    for sweep in (False, True):
        monkeypatch.setattr(products, "SWEEP", sweep)
        names, params = params_of(decorator(**AXES))
        assert names == ["shape", "dtype", "bias"]
        assert all(bool(param.marks) is sweep for param in params)
        runs.append([param.values for param in params])
    assert sorted(runs[0] + runs[1]) == EVERYTHING


@pytest.mark.parametrize("decorator", [once, pairwise])
def test_sweep_runs_all_where_a_body_took_pairs(decorator, monkeypatch):
    monkeypatch.setattr(products, "SWEEP", True)
    _, params = params_of(decorator(**AXES), takes_pairs=True)
    assert sorted(param.values for param in params) == EVERYTHING


def test_ids_are_keys_and_names():
    _, params = params_of(once(shape={"small": 1}, bias=[len, "relu"]))
    assert [param.id for param in params] == ["small-len", "small-relu"]
