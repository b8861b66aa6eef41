"""A rank that leaves an op before its call is numbered: its next call is not taken for that one."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests.on_ranks import on_ranks
from tests.ops.test_parting import STEPS, said_by
from tpkernels.comm.calls import calls_of
from tpkernels.ops import row_linear


class Interrupting(TorchDispatchMode):
    """Ctrl-C in the first operator of torch."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        raise self.error


@pytest.mark.parametrize("error", [KeyboardInterrupt("Ctrl-C"), MemoryError("planted")], ids=type)
@pytest.mark.parametrize("name", [name for name in STEPS if name != "column_gelu"])
@on_ranks(2)
def test_the_group_fails_on_all_ranks(name, error):
    call, shapes = STEPS[name]
    group = dist.new_group(timeout=timedelta(seconds=60))
    operands = [torch.ones(shape) for shape in shapes]

    def step():
        return call(group, *operands)

    step()  # now ranks have agreed on how rows travel
    number = calls_of(group)._number
    if dist.get_rank() == 0:
        with Interrupting(error), pytest.raises(type(error)):
            step()
        assert calls_of(group)._number == number, "interrupted too late for this test"
    else:
        said = said_by(step)
        assert said.startswith("RuntimeError"), said
        assert f"rank 0: {type(error).__name__}" in said
    assert f"has failed and cannot be used any more: rank 0: {type(error).__name__}" in said_by(step)
    dist.barrier()


@on_ranks(2)
def test_a_refused_argument_leaves_the_group_alive():
    group = dist.new_group()
    x, w = torch.ones(4, 8), torch.ones(4, 8)
    for wrong in (x.int(), torch.ones(4, 9)):
        assert said_by(lambda wrong=wrong: row_linear(wrong, w, None, group)).startswith(("Type", "Value"))
    assert torch.equal(row_linear(x, w, None, group), torch.full((4, 4), 16.0))
