"""Pushes over symmetric memory by the extension: what Python's do, and by the operator that torch has."""

import pytest
import torch

from tests.loopback import open_symmetric_loopback, start
from tpkernels.comm.schedule import reduce_plan
from tpkernels.comm.transports.memory import Layout
from tpkernels.extension import steps


@pytest.mark.parametrize("splits", [1, 2, 3])
def test_the_extension_pushes_what_python_does(splits):
    """Rows that are sent whole, and cut out of more; flags of each chunk, in both slots."""
    found = []
    for native in (True, False):
        ends = open_symmetric_loopback("it", Layout(3, (6, 2), torch.float32, splits))
        for end in ends:
            assert end.native_push is not None, "the suite runs with the extension"
            end.native_push = end.native_push if native else None
        shards = [torch.arange(12.0).view(6, 2) + 100 * rank for rank in range(3)]
        gathers = [start(end, shards) for end in ends]
        for delivery in gathers:
            delivery.end()
        plans = [reduce_plan(18, 3, end.rank, splits, False) for end in ends]
        reduces = [end.begin(None, plan, 2, shards[0]) for end, plan in zip(ends, plans, strict=True)]
        for delivery, plan in zip(reduces, plans, strict=True):
            delivery.move(plan.together, 7 * torch.cat(shards), 0)  # of which each rank gets its own part
        found.append([end._memory.clone() for end in ends])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert all(memory.any() for memory in found[0])


def test_words_are_written_by_the_operator_that_torch_has():
    """The extension calls it by its schema, which no CPU runs; and checks what it writes itself."""
    schema = str(torch.ops.symm_mem.stream_write_value32_.default._schema)
    assert schema == "symm_mem::stream_write_value32_(Tensor(a!) input, int offset, int val) -> Tensor(a!)"
    push, rows, words = steps().push, torch.ones(2, 2), torch.zeros(4, dtype=torch.uint32)
    for landing, there, chunk, word in (
        (rows, words, 4, 1), (rows, words, -1, 1), (rows, words[::2], 0, 1), (rows, words.int(), 0, 1),
        (rows, words, 0, -1), (rows, words, 0, 2**40),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match="push: expected"):
            push(rows, ((landing, there, 0, chunk, 1),), word)
    with pytest.raises(OverflowError):
        push(rows, (), 2**70)
    assert not words.any()
