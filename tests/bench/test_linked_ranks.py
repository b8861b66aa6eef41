"""Ranks on a link, whose times are worked out by hand."""

from dataclasses import replace

import pytest

from bench.linked_ranks import MeasuredRanks, ran
from bench.streams.times import HOST, PRODUCT, TRANSFER
from tpkernels.comm.schedule import gather_plan, parts_of_shard

ROWS, COLS = 2048, 1024
SHARD = ROWS // 2 * COLS * 4
MACHINE = MeasuredRanks(
    product=lambda kernel, rows: rows / ROWS,
    sum=0.0,
    zeros=0.0,
    bytes_a_second=SHARD,
    notice=0.0,
    stolen=0.0,
    skew=0.0,
)


def seconds(case, machine=MACHINE, *, overlap):
    return max(each.stop for each in ran(case, machine, overlap=overlap))


def test_in_turn_a_message_and_then_the_product():
    # A second each; a product of all rows takes one, and so does a shard on its way.
    assert seconds("column forward", overlap=False) == pytest.approx(2)
    assert seconds("row forward", overlap=False) == pytest.approx(2)
    assert seconds("row backward", overlap=False) == pytest.approx(3)
    assert seconds("column backward", overlap=False) == pytest.approx(3)  # x travels beside dgrad
    late = replace(MACHINE, skew=0.1)
    assert seconds("row forward", late, overlap=False) == pytest.approx(1.1 + 1)


def test_overlapped_all_but_the_last_chunk_is_hidden():
    """Own rows take half a second, chunks of 4, 3, 2, 1 tenths of a shard arrive in a second."""
    last = 1024 - 1024 * 9 // 10
    assert seconds("column forward", overlap=True) == pytest.approx(1 + last / ROWS)
    first = -(-1024 // 10)  # of the rank whose first chunk is a row longer
    assert seconds("row forward", overlap=True) == pytest.approx(1 + first / ROWS)


def test_what_is_computed_beside_products_takes_its_time():
    summing = replace(MACHINE, sum=0.25)
    assert seconds("row forward", summing, overlap=False) == pytest.approx(2.25)
    zeroing = replace(MACHINE, zeros=0.25)
    more = seconds("row backward", zeroing, overlap=True) - seconds("row backward", overlap=True)
    assert more == pytest.approx(0.25)


def test_chunks_are_those_of_the_schedule():
    found = [each.task for each in ran("column forward", MACHINE, overlap=True) if each.task.kind == TRANSFER]
    sizes = sorted(SHARD * task.seconds / COLS / 4 for task in found if task.queue == ("to", 0, 1))
    planned = gather_plan(ROWS, 2, 0, parts_of_shard(SHARD)).swaps
    assert sizes == pytest.approx(sorted(swap.sent.stop - swap.sent.start for swap in planned))


def test_products_are_those_of_all_rows():
    for case, kernels in {"column forward": 1, "row forward": 1, "row backward": 2}.items():
        tasks = [each.task for each in ran(case, MACHINE, overlap=True) if each.task.kind == PRODUCT]
        of_a_rank = [task.seconds for task in tasks if task.queue == (HOST, 0)]
        assert len(of_a_rank) > kernels, "in chunks"
        assert sum(of_a_rank) == pytest.approx(kernels)


def test_messages_take_time_from_the_thread_that_multiplies():
    """A tenth of a core each way; both cores multiply, so that each loses a tenth while messages travel."""
    stolen = replace(MACHINE, stolen=0.1, bytes_a_second=SHARD / 10)
    slow = seconds("column backward", stolen, overlap=True) - seconds(
        "column backward", replace(stolen, stolen=0.0), overlap=True
    )
    assert 0 <= slow < 0.3
    beside = next(each for each in ran("column backward", stolen, overlap=True) if each.task.kind == PRODUCT)
    assert beside.stop - beside.start == pytest.approx(beside.task.seconds / 0.9)


def test_a_message_waits_until_its_receiver_says_that_it_waits():
    late = replace(MACHINE, notice=0.5)
    assert seconds("column forward", late, overlap=False) == pytest.approx(2.5)
