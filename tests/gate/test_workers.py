"""Work in processes of its own: one that dies takes its own item along, and no other."""

import os

from tpkernels.gate.workers import results_of


def doubled(number: int) -> int | None:
    if number == 3:
        os._exit(1)
    return 2 * number


def test_only_the_item_that_kills_its_process_is_lost():
    told = []
    assert results_of(doubled, [1, 2, 3, 4], 2, told.append, None) == [2, 4, None, 8]
    assert sorted(told) == [1, 2, 3, 4]
    assert results_of(doubled, [], 2, told.append, None) == []
