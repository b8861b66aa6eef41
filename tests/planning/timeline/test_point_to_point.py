"""Messages over sockets, on two ranks whose times are worked out by hand."""

from dataclasses import replace

import pytest

from tpkernels.comm.schedule import gather_plan, parts_of_shard
from tpkernels.planning.timeline.operators import OPERATORS, Sizes
from tpkernels.planning.timeline.point_to_point import MeasuredRanks, PointToPoint, sockets
from tpkernels.planning.timeline.recording import HOST, PRODUCT, TRANSFER, Rank
from tpkernels.planning.timeline.simulation import TimelineTask, run

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


def ran(case, machine=MACHINE, *, overlap):
    kind, direction = case.split()
    sizes = Sizes(ROWS, COLS, 4096, 2) if kind == "column" else Sizes(ROWS, 4096, COLS, 2)
    tasks = list[TimelineTask]()
    for number in range(2):
        OPERATORS[f"{kind}_linear"][direction](
            PointToPoint(Rank(number, 2, tasks), machine, overlap=overlap), sizes
        )
    return list(run(tasks, sockets(2)).values())


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


def test_weight_gradients_are_taken_of_a_quarter_of_the_rows_at_least():
    rows = [
        ROWS * each.task.seconds
        for each in ran("row backward", overlap=True)
        if each.task.kind == PRODUCT and each.task.name == "wgrad" and each.task.queue == (0, HOST)
    ]
    assert sum(rows) == pytest.approx(ROWS)
    assert all(count >= ROWS // 4 for count in rows[:-1])


def test_chunks_are_those_of_the_schedule():
    found = [each.task for each in ran("column forward", overlap=True) if each.task.kind == TRANSFER]
    sizes = sorted(SHARD * task.seconds / COLS / 4 for task in found if task.queue[0] == 0)
    planned = gather_plan(ROWS, 2, 0, parts_of_shard(SHARD)).swaps
    assert sizes == pytest.approx(sorted(swap.sent.stop - swap.sent.start for swap in planned))


def test_messages_take_time_from_the_thread_that_multiplies():
    """A tenth of a core each way; both cores multiply, so that each loses a tenth while messages travel."""
    stolen = replace(MACHINE, stolen=0.1, bytes_a_second=SHARD / 10)
    slow = seconds("column backward", stolen, overlap=True) - seconds(
        "column backward", replace(stolen, stolen=0.0), overlap=True
    )
    assert 0 <= slow < 0.3
    beside = next(each for each in ran("column backward", stolen, overlap=True) if each.task.kind == PRODUCT)
    assert beside.stop - beside.start == pytest.approx(beside.task.seconds / 0.9)
