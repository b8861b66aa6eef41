"""What an op enqueues on a GPU: a few launches, whatever the sizes."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest

from tests.comm.counting import CASES, Count, count
from tpkernels.comm import tensor_parallel

SIZES = [(2048, 2, 4096), (8192, 8, 4096), (32768, 4, 8192)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_without_overlap_a_transfer_is_one_collective_and_a_product_one_kernel(case, sizes):
    transfers = 2 if case == "column backward" else 1
    products = 2 if "backward" in case else 1
    found = count(case, "c10d", *sizes, overlap=False)
    assert (found.collectives, found.products, found.copies) == (transfers, products, 0)
    # what sums the slots; a gather has none
    assert found.other_kernels == (case in ("column backward", "row forward"))


@pytest.mark.parametrize(
    ("case", "collectives", "products"),
    [("column forward", 1, 1), ("column backward", 2, 2), ("row forward", 2, 2), ("row backward", 1, 2)],
)
def test_c10d_at_the_sizes_of_a_large_layer(case, collectives, products):
    found = count(case, "c10d", 8192, 8, 4096)
    assert (found.collectives, found.products, found.copies) == (collectives, products, 0)
    assert (found.flags, found.waits) == (0, 0)
    assert found.other_kernels == (case in ("column backward", "row forward"))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_symmetric_memory_takes_one_kernel_a_product(sizes):
    _, ranks, _ = sizes
    chunks = {2: 4, 4: 2, 8: 1}[ranks]  # of a shard
    pushes = (ranks - 1) * chunks + 1  # at most eight to the others, and own rows
    flags = ranks * chunks + 1  # of each chunk, and the word that the kernel awaits
    forward = Count(collectives=0, products=1, other_kernels=0, copies=pushes, flags=flags, waits=2)
    assert count("column forward", "symmetric", *sizes) == forward
    # the kernel stores and raises flags itself: one word of ours says which call is awaited
    row = Count(collectives=0, products=1, other_kernels=1, copies=0, flags=1, waits=0)
    assert count("row forward", "symmetric", *sizes) == row
    # the gathered rows are kept for the second product, which is a copy out of the slots
    backward = replace(forward, products=2, other_kernels=1)
    assert count("row backward", "symmetric", *sizes) == backward
    both = replace(forward, products=2, other_kernels=2, flags=flags + 1)
    assert count("column backward", "symmetric", *sizes) == both


def test_a_schedule_of_many_rounds_would_be_seen():
    with patch.object(tensor_parallel, "rounds_for", lambda *_: 8):
        found = count("column forward", "c10d", 8192, 8, 4096)
    assert (found.collectives, found.products) == (7, 8)
