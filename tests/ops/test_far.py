"""Groups that span machines: memory inside each, point to point between them."""

from __future__ import annotations

import pytest
import torch

from tests.ops import far_cases as cases

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-ins are for memory of the CPU")


def test_only_rows_for_other_machines_are_sent(ranks4):
    for rank, (gathered_to, reduced_to, near) in enumerate(ranks4.run(cases.peers_by_way)):
        assert gathered_to == reduced_to == [1 - rank % 2, 3 - rank % 2]
        assert near == [rank % 2, rank % 2 + 2]


def test_a_later_call_may_be_read_first(ranks2):
    assert ranks2.run(cases.later_call_read_first) == [([True] * 2, [True] * 2)] * 2


def test_symmetric_memory_is_asked_for_among_neighbours(ranks4):
    found = ranks4.run(cases.opened_symmetric, " apart")
    assert [number for _, number, *_ in found] == [0, 0, 1, 1]
    for rank, (name, _, size, near, number) in enumerate(found):
        assert size == 2
        assert name.endswith(f", ranks {rank % 2}, {rank % 2 + 2}")
        assert (near, number) == ([rank % 2, rank % 2 + 2], rank)
    for rank, (name, number, size, near, _) in enumerate(ranks4.run(cases.opened_symmetric, "")):
        assert (number, size, near) == (rank, 4, [0, 1, 2, 3])
        assert ", ranks" not in name  # the group itself


@pytest.mark.parametrize("fault", ["no memory", "no stream", "no thread"])
def test_a_rank_that_cannot_open_its_end_is_an_error_on_all_and_leaves_nothing(ranks2, fault):
    """In symmetric memory others would wait in the barrier, in shared memory for rows."""
    for rank, found in enumerate(ranks2.run(cases.fails_on_the_last_rank, fault)):
        said, rendezvous, barriers, threads, again = found
        assert said.endswith(f"op: it on rank {rank}: rank 1 cannot take part: MemoryError: planted")
        assert (rendezvous, barriers, threads) == (fault == "no stream", 0, 0)  # nobody waits for rank 1
        assert again == "no error"


def test_neighbours_are_known_as_long_as_their_group(ranks2):
    assert ranks2.run(cases.neighbours_of_a_group_that_ends) == [[True, False]] * 2


def test_a_transfer_that_cannot_start_names_the_operator(ranks2):
    for rank, message in enumerate(ranks2.run(cases.broken_swap)):
        assert message.startswith(f"RuntimeError: column_linear: rank {1 - rank} cannot be reached: it died")
