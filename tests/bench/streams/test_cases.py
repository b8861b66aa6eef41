"""Our operators on the machine of streams: in every order the numbers of a matrix that is not split."""

import gc

import pytest

from bench.streams.cases import all_programs
from bench.streams.search import search
from tests.products import SWEEP

PROGRAMS = all_programs()
SHORT = 10  # orders
IN_SHORT = {  # what `make test` runs; each transport and mode is there
    "column, sequence-parallel/c10d, 2 rounds/captured/2 ranks",
    "column, sequence-parallel/symmetric/eager/2 ranks",
    "column, gathered rows saved/symmetric/eager/2 ranks",
    "column/c10d, 1 rounds/eager/2 ranks",
    "column, sequence-parallel/symmetric-rounds, 2 rounds/captured/2 ranks",
    "row, sequence-parallel/symmetric/captured/2 ranks",
    "row, sequence-parallel/symmetric-rounds, 2 rounds/eager/4 ranks",
    "row/symmetric-rounds, 2 rounds/captured/2 ranks",
    "two streams/symmetric-rounds, 1 rounds/eager/2 ranks",
    "row/symmetric/eager/2 ranks",
    "row/c10d, 2 rounds/eager/4 ranks",
    "mlp, sequence-parallel/symmetric/eager/4 ranks",
    "mlp/symmetric/captured/2 ranks",
    "gather of tokens/c10d, 1 rounds/eager/2 ranks",
    "gather of features/c10d, 1 rounds/captured/2 ranks",
    "gated mlp/symmetric/captured/2 ranks",
    "vocabulary/symmetric/eager/2 ranks",
    "row in fp8/symmetric/captured/2 ranks",
    "gathers in flight/symmetric/eager/2 ranks",
    "products in flight/symmetric/eager/2 ranks",
    "sums in flight/symmetric/eager/2 ranks",
    "buckets/c10d, 1 rounds/eager/2 ranks",
    "buckets beside tensor-parallel groups/c10d, 1 rounds/eager/4 ranks",
    "two streams/symmetric/eager/2 ranks",
    "two streams/c10d, 1 rounds/eager/2 ranks",
}


def test_what_is_run_exists():
    assert PROGRAMS.keys() >= IN_SHORT


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.sweep if SWEEP else ())
        for name in PROGRAMS
        if (name in IN_SHORT) != SWEEP
    ],
)
def test_every_order_gives_the_same_numbers(name):
    program, expected = PROGRAMS[name]()
    orders = 2 if "8 ranks" in name else SHORT
    assert search(program, orders, expected, waves=True).orders == orders
    del program, expected
    if SWEEP:
        gc.collect()  # a program and its memory hold each other, and the next is as large
