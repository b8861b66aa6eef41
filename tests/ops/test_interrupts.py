"""A rank that leaves an op before its call is numbered, or leaves it out, is not a call ahead."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.on_ranks import on_ranks
from tests.ops.test_parting import STEPS, TOKENS, WIDTH, said_by
from tests.ops.transport_cases import using
from tpkernels.comm.calls import Calls, calls_of
from tpkernels.ops import row_linear, vocab_embedding


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
            with patch.object(Calls, "begin", side_effect=error), pytest.raises(type(error)):
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


@pytest.mark.parametrize("left_out", ["an op, which refuses", "an op", "a batch"])
@pytest.mark.parametrize("transport", ["c10d", "chunks", "shared"])
@on_ranks(2)
def test_what_one_rank_leaves_out_is_told_to_all_though_shapes_are_equal(transport, left_out):
    """Batch 3, or an op of it. No rank has numbers of batch 4: in the first two calls ids are looked at."""
    group, table, w = dist.new_group(), torch.randn(2 * WIDTH, WIDTH), torch.ones(WIDTH, WIDTH)
    leaves_out = dist.get_rank() == 1

    def forward(batch: int) -> None:
        if leaves_out and (batch, left_out) == (3, "a batch"):
            return
        x = vocab_embedding((torch.arange(TOKENS) + batch) % WIDTH, table, group)
        for number in range(3):
            if not (leaves_out and (batch, number) == (3, 1)):
                x = row_linear(x, w, None, group)
            elif left_out == "an op, which refuses":
                assert "expected" in said_by(lambda: row_linear(x, w[:, 1:], None, group))  # noqa: B023

    with using(transport):
        said = [said_by(lambda: forward(batch)) for batch in range(1, 5)]  # noqa: B023
        dist.barrier()
    assert said[:2] == ["no error", "no error"]
    told = said[2:] if left_out == "an op, which refuses" else said[3:]
    assert ["ranks have left the common order of calls" in each for each in told] == [True] * len(told), said
