"""Which combinations of a product are run."""

import itertools

import pytest

from tests import products
from tests.products import covering, once, paired, pairwise

AXES = {"shape": {"small": 1, "large": 100}, "dtype": ["fp32", "bf16"], "bias": [False, True]}


@pytest.mark.parametrize("sizes", [(3, 4), (4, 6, 3, 2), (1, 5), (7,)])
def test_covers_hold_all_values_and_all_pairs(sizes):
    pairs, values = covering(sizes, 2), covering(sizes, 1)
    for one, other in itertools.combinations(range(len(sizes)), 2):
        met = {(combination[one], combination[other]) for combination in pairs}
        assert met == set(itertools.product(range(sizes[one]), range(sizes[other])))
    assert [set(each) for each in zip(*values, strict=True)] == [set(range(size)) for size in sizes]
    assert len(values) == max(sizes)
    assert len(set(paired("ab", (1, 2, 3), (False, True)))) < 12


def params_of(decorator):
    def plain(shape, dtype, bias): ...

    (mark,) = decorator(**AXES)(plain).pytestmark
    return mark.args[1]


@pytest.mark.parametrize("decorator", [once, pairwise])
def test_sweep_runs_the_rest_and_only_that(decorator, monkeypatch):
    runs = []
    for sweep in (False, True):
        monkeypatch.setattr(products, "SWEEP", sweep)
        params = params_of(decorator)
        assert all(bool(param.marks) is sweep for param in params)
        runs.append([param.id for param in params])
    everything = itertools.product(("small", "large"), ("fp32", "bf16"), ("False", "True"))
    assert sorted(runs[0] + runs[1]) == sorted("-".join(ids) for ids in everything)


def test_sweep_runs_all_where_a_body_takes_pairs(monkeypatch):
    def of_pairs(shape, dtype, bias, combined): ...

    monkeypatch.setattr(products, "SWEEP", True)
    (mark,) = pairwise(**AXES)(of_pairs).pytestmark
    assert len(mark.args[1]) == 8
