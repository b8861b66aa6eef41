"""A rank that leaves an op before its call is numbered: its next call is not taken for that one."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.on_ranks import on_ranks
from tests.ops.test_parting import STEPS, said_by
from tpkernels.comm.calls import GroupCalls, calls_of
from tpkernels.ops import row_linear


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt("Ctrl-C"), MemoryError("planted")], ids=["Ctrl-C", "memory"]
)
@on_ranks(2)
def test_the_group_fails_on_all_ranks(error):
    for name in ("column of shards", "row", "mlp", "embedding", "cross_entropy", "region"):
        call, shapes = STEPS[name]
        group = dist.new_group()
        operands = [torch.ones(shape) for shape in shapes]
        call(group, *operands)
        if dist.get_rank() == 0:
            number = calls_of(group)._number
            with patch.object(GroupCalls, "handshake", side_effect=error), pytest.raises(type(error)):
                call(group, *operands)
            assert calls_of(group)._number == number
        else:
            assert said_by(lambda: call(group, *operands)).startswith("RuntimeError"), name  # noqa: B023
        said = said_by(lambda: call(group, *operands))  # noqa: B023
        assert f"has failed and cannot be used any more: rank 0: {type(error).__name__}" in said, name
        dist.barrier()


@on_ranks(2)
def test_a_refused_argument_leaves_the_group_alive():
    group = dist.new_group()
    x, w = torch.ones(4, 8), torch.ones(4, 8)
    for wrong in (x.int(), torch.ones(4, 9)):
        assert said_by(lambda wrong=wrong: row_linear(wrong, w, None, group)).startswith(("Type", "Value"))
    assert torch.equal(row_linear(x, w, None, group), torch.full((4, 4), 16.0))
