"""The order of rounds, the median, and scratch operands; the clock of the GPU on a GPU."""

import pytest
import torch

from tpkernels.dispatch.scratch import scratch_like
from tpkernels.dispatch.timing import FEWEST_ROUNDS, MOST_ROUNDS, SECONDS, CudaTimer, rounds

CPU = torch.device("cpu")


def test_candidates_take_turns_and_each_goes_first():
    order = []
    rounds({name: name.upper for name in "abc"}, lambda run: order.append(run()) or 1.0, clock=lambda: 0.0)
    assert "".join(order[:9]) == "ABCBCACAB"
    assert len(order) == 3 * MOST_ROUNDS


def test_outliers_do_not_count():
    times = iter([1.0, 100.0, 1.0, 1.0, 1.0] * MOST_ROUNDS)
    assert rounds({"a": object}, lambda run: next(times)) == {"a": 1.0}


def test_slow_candidates_get_fewer_rounds():
    ticks = iter([0.0, *(SECONDS + i for i in range(1, 100))])
    count = []
    rounds({"a": object}, lambda run: count.append(run) or 1.0, clock=lambda: next(ticks))
    assert len(count) == FEWEST_ROUNDS


LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.T,
    "strided": lambda x: x[:, ::2],
    "misaligned": lambda x: x[:, 1:],
    "expanded": lambda x: x[:1].expand(8, -1),
    "vector": lambda x: x[0],
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_scratch_lies_like_the_operand_in_other_memory(layout, dtype):
    x = layout(torch.zeros(16, 24, dtype=dtype))
    scratch, word, none = scratch_like((x, "gelu", None), 24, CPU)
    assert (word, none) == ("gelu", None)
    assert (scratch.shape, scratch.stride(), scratch.dtype) == (x.shape, x.stride(), x.dtype)
    assert scratch.data_ptr() % 16 == x.data_ptr() % 16
    assert scratch.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    assert scratch.float().std() > 0.1


@pytest.mark.gpu
def test_gpu_timer_tells_a_large_product_from_a_small_one():
    device = torch.device("cuda", torch.cuda.current_device())
    small, large = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for n in (1024, 8192))
    times = CudaTimer(device)({"small": lambda: small @ small, "large": lambda: large @ large})
    assert 0 < 4 * times["small"] < times["large"]
