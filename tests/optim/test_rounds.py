"""Matrices are dealt out by what they cost, in rounds of limited size."""

from __future__ import annotations

import pytest

from tpkernels.optim.newton_schulz import multiplications
from tpkernels.optim.rounds import plan_rounds


def dealt(costs, sizes, ranks, round_bytes):
    rounds = plan_rounds(costs, sizes, ranks, round_bytes)
    return [[(job.position, job.owner) for job in jobs] for jobs in rounds]


def test_expensive_matrices_are_dealt_out_first():
    assert dealt([5, 1, 1, 3], [8] * 4, 2, 100) == [[(0, 0), (3, 1), (1, 1), (2, 1)]]


def test_rounds_are_cut_by_bytes_at_a_multiple_of_the_ranks():
    assert dealt([5, 1, 1, 3], [8] * 4, 2, 8) == [[(0, 0), (3, 1)], [(1, 1), (2, 0)]]
    assert [len(jobs) for jobs in dealt([1] * 7, [8] * 7, 3, 1)] == [3, 3, 1]
    assert dealt([], [], 2, 8) == []


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_have_equally_much_to_do_in_a_model(ranks):
    layer = [(1024, 1024)] * 4 + [(4096, 1024), (1024, 4096)]
    costs = [multiplications(shape) for shape in layer * 8]
    work = [0] * ranks
    for jobs in plan_rounds(costs, [2 * a * b for a, b in layer * 8], ranks, 2**24):
        for job in jobs:
            work[job.owner] += costs[job.position]
    assert max(work) < 1.1 * sum(work) / ranks


def test_a_step_multiplies_the_smaller_gram_matrix():
    assert multiplications((2, 3)) == multiplications((3, 2)) == 2 * 2 * 3 + 2 * 2 * 2 + 2 * 2 * 3
