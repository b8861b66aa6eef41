"""A rank that leaves an op before its call is numbered, or leaves it out, is not a call ahead."""

import linecache
import sys
from contextlib import suppress
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.on_ranks import of_all, on_ranks
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


class AtEntry:
    """Collects lines that run before an op has entered its calls, and is interrupted where `line` runs first.

    Lines of the op itself up to its context are the caller's: nothing has been done that others wait for.
    """

    def __init__(self, line=None):
        self.line, self.seen, self._depth = line, {}, 0

    def __enter__(self):
        sys.settrace(self._called)

    def __exit__(self, *_):
        sys.settrace(None)

    def _called(self, frame, event, _):
        code = frame.f_code
        if "/tpkernels/" not in code.co_filename:
            return None
        if self._depth:
            return self._ran
        if code.co_name == "split_of" or (
            code.co_name == "__enter__" and isinstance(frame.f_locals["self"], Calls)
        ):
            self._depth, self._first = 1, True
            return self._ran_first
        return None

    def _ran_first(self, frame, event, _):
        if event == "return":
            self._depth = 0
        elif event == "line" and self._first:  # up to its `try`
            self._first = "try" not in linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        elif event == "line":
            self._saw(frame)
        return self._ran_first

    def _ran(self, frame, event, _):
        if event == "line" and not self._first:
            self._saw(frame)
        return self._ran

    def _saw(self, frame):
        line = frame.f_code.co_filename, frame.f_lineno
        if line not in self.seen:
            self.seen[line] = None
            if line == self.line:
                raise KeyboardInterrupt


def entered(name, earlier, line=None):
    """An op that rank 0 is interrupted in; lines that ran there, and what this rank says of the next op."""
    call, shapes = STEPS[name]
    group, operands, planted = dist.new_group(), [torch.ones(shape) for shape in shapes], AtEntry(line)
    dist.barrier()  # else a group that fails at once ends before all ranks have connected
    for _ in range(earlier):
        call(group, *operands)
    if dist.get_rank() == 0:
        with suppress(KeyboardInterrupt), planted:
            call(group, *operands)
    elif line is not None:
        said_by(lambda: call(group, *operands))
    else:
        call(group, *operands)
    said = said_by(lambda: call(group, *operands))
    dist.barrier()  # else the group of the rank that is first ends while another is in its last call
    return [*planted.seen], said


@pytest.mark.parametrize("name", ["row", "head"])
@on_ranks(2)
def test_the_group_fails_from_the_entry_of_an_op_on(name):
    for earlier in (0, 1):
        lines, said = entered(name, earlier)
        lines = of_all(lines)[0]
        assert said == "no error"
        assert len(lines) >= 4
        for line in lines:
            said = entered(name, earlier, line)[1]
            assert "rank 0: KeyboardInterrupt" in said, (line, said)
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
