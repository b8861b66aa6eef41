"""Calls over gloo: what travels with a header and what behind it; calls that a rank skips."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.checks import error_of
from tests.on_ranks import on_ranks
from tpkernels.comm import calls
from tpkernels.comm.tensor_parallel import TensorParallel
from tpkernels.comm.transports.c10d import MESSAGE, PointToPoint
from tpkernels.comm.transports.rows import Terms
from tpkernels.ops import column_linear, row_linear


@pytest.mark.parametrize("above", [0, 1], ids=["with the header", "behind it"])
@on_ranks(2, 4)
def test_rows_at_the_edge_of_a_message_arrive(above):
    tp = TensorParallel(dist.group.WORLD, sequence_parallel=True)
    size = tp.calls.eager_bytes // 4 + above
    tp.calls.kinds.clear()
    shards = [torch.arange(size, dtype=torch.int32)[:, None] + 7 * rank for rank in range(tp.ranks)]
    gathered = tp.gather("op", "x", shards[tp.rank]).all()
    assert torch.equal(gathered, torch.cat(shards))
    terms = gathered * (1 + tp.rank)
    total = tp.reduce_scatter("op", Terms(len(terms), 1, terms, terms.__getitem__)).wait()
    assert torch.equal(total, shards[tp.rank] * sum(range(1, tp.ranks + 1)))
    found = {type(kind.transport) for kind in tp.calls.kinds.values()}
    assert found == {PointToPoint if above else type(MESSAGE)}


@on_ranks(2)
def test_a_skipped_call_is_told_where_ranks_come_to_another_kind():
    group, x, weight = dist.new_group(), torch.ones(4, 3), torch.ones(5, 3)
    for _ in range(3 - dist.get_rank()):  # two calls of a kind look alike
        first = error_of(row_linear, x, weight, None, group)
        if first[1]:
            break
    found = first if first[1] else error_of(column_linear, x, weight, None, group, sequence_parallel=True)
    assert found[0] == "RuntimeError"
    assert "ranks have left the common order of calls: call " in found[1]
    assert "'row_linear: gather of terms of the sum" in found[1]
    assert "'column_linear: gather of x" in found[1]
    kind, text = error_of(row_linear, x, weight, None, group)
    assert (kind, "has failed and cannot be used any more: rank " in text) == ("RuntimeError", True)


@on_ranks(2)
def test_an_error_of_ranks_apart_has_few_frames_of_ours():
    group, op = dist.new_group(), (column_linear, row_linear)[dist.get_rank()]
    x = torch.ones(4, 3, requires_grad=True)

    def twice():
        for _ in range(2):
            op(x, torch.ones(5, 3), None, group, sequence_parallel=True)

    column_linear(x, torch.ones(5, 3), None, group, sequence_parallel=True)  # ranks agree on a transport
    with pytest.raises(RuntimeError, match="left the common order") as raised:
        twice()
    frames = [frame for frame in raised.traceback if "/tpkernels/" in str(frame.path)]
    assert 1 < len(frames) <= 3
    assert (raised.value.__cause__, raised.value.__suppress_context__) == (None, True)


@on_ranks(2)
def test_an_interrupt_leaves_no_calls_that_outlive_their_group():
    """Another group may get its id."""
    group = dist.new_group()
    with patch.object(calls, "finalize", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        calls.calls_of(group)
    assert id(group) not in calls.CALLS_OF
