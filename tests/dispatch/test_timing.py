"""The order of rounds, the median, time apart from launches, scratch operands; the GPU's clock on a GPU."""

import pytest
import torch

from tests.dispatch.simulated_stream import FLUSH, NeverHeld, SimulatedStream
from tpkernels.dispatch import timing
from tpkernels.dispatch.chooser import winner
from tpkernels.dispatch.soundness import scratch_like
from tpkernels.dispatch.timing import SLACK, CudaTimer, StreamClock, StreamTimer, rounds

CPU = torch.device("cpu")


def test_candidates_take_turns_and_outliers_do_not_count():
    order = []
    rounds(list("abc"), lambda name: order.append(name) or 1.0, clock=lambda: 0.0)
    assert "".join(order[:9]) == "abcbcacab"
    assert len(order) == 3 * timing.MOST_ROUNDS
    times = iter([1.0, 100.0, 1.0, 1.0, 1.0] * timing.MOST_ROUNDS)
    assert rounds(["a"], lambda name: next(times)) == {"a": 1.0}
    ticks = iter([0.0, *(timing.SECONDS + i for i in range(1, 100))])
    count = []
    rounds(["a"], lambda name: count.append(name) or 1.0, clock=lambda: next(ticks))
    assert len(count) == timing.FEWEST_ROUNDS


# milliseconds of the host and of the GPU: a descriptor is heavier to launch, and its kernel the faster one
TORCH, DESCRIPTOR = (0.02, 0.075), (0.07, 0.05)


def times_on(stream, **kernels):
    runs = {name: stream.kernel(*spent) for name, spent in kernels.items()}
    return StreamTimer(stream, stream.clock)(runs)


def test_launching_is_no_time_of_the_gpu_but_without_a_hold_it_would_be():
    # Though it takes longer than the flush, which alone cannot hide it.
    times = times_on(SimulatedStream(), torch=TORCH, descriptor=DESCRIPTOR).eager
    assert times == pytest.approx({"torch": 0.075, "descriptor": 0.07})
    assert winner(times) == "descriptor"
    times = times_on(NeverHeld(), torch=TORCH, descriptor=DESCRIPTOR).eager
    assert times["torch"] == pytest.approx(0.075)
    assert times["descriptor"] > 0.08
    assert winner(times) == "torch"


def test_in_a_captured_graph_the_hosts_time_does_not_count():
    eager, captured = times_on(SimulatedStream(), torch=(0.02, 0.06), descriptor=DESCRIPTOR)
    assert eager == pytest.approx({"torch": 0.06, "descriptor": 0.07})
    assert captured == pytest.approx({"torch": 0.06, "descriptor": 0.05})


def test_many_launches_cost_what_the_host_takes():
    stream = SimulatedStream()

    def ten_small_ones():
        for _ in range(10):
            stream.enqueue(0.02, 0.005)

    times = StreamTimer(stream, stream.clock)({"ten": ten_small_ones}).eager
    assert times == pytest.approx({"ten": 0.2})


def test_a_hold_is_as_long_as_launching_took_before():
    stream = SimulatedStream()
    times_on(stream, kernel=(0.3, 0.01))
    assert stream.held == pytest.approx([2 * 0.3 + timing.SLACK] * timing.MOST_ROUNDS)


def test_a_run_that_was_held_too_shortly_is_timed_again():
    """Its host time is that of another moment than the one it was held for."""
    stream, launches = SimulatedStream(), []

    def slow_now_and_then():
        launches.append(len(launches))
        stream.enqueue(2.0 if launches[-1] == timing.WARM_UPS else 0.01, 0.05)

    times = StreamTimer(stream, stream.clock)({"kernel": slow_now_and_then}).eager
    assert times == pytest.approx({"kernel": 0.05})
    assert len(launches) == timing.WARM_UPS + timing.MOST_ROUNDS + 1


def test_a_run_that_waits_for_the_gpu_is_timed_all_the_same():
    stream = SimulatedStream()

    def waits():
        stream.enqueue(0.01, 0.05)
        stream.now = stream.done

    times = StreamTimer(stream, stream.clock)({"kernel": waits}).eager
    assert times["kernel"] == pytest.approx(0.05 + 0.01 + FLUSH, abs=0.02)
    assert len(stream.held) == timing.TRIES, "then it is held no more"


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
    times = CudaTimer(device)({"small": lambda: small @ small, "large": lambda: large @ large}).captured
    assert 0 < 4 * times["small"] < times["large"]


def test_a_stream_is_held_as_long_as_a_way_was_launched_before():
    """The time between its launch and what it was held for would count as time of the GPU."""
    stream = SimulatedStream()
    clock = StreamClock(StreamTimer(stream, stream.clock))
    way = stream.kernel(1.5, 1.6)
    first, *later = [clock("long", way) for _ in range(3)]
    assert first > 1.9
    assert later == pytest.approx([1.6, 1.6])
    assert stream.held == pytest.approx([2 * least + SLACK for least in (0.5, 1.5, 1.5)])


def test_ways_that_are_launched_quickly_are_held_for_one_time_on_all_ranks():
    """A rank whose stream begins earlier would wait for the others, and count that."""
    stream = SimulatedStream()
    clock = StreamClock(StreamTimer(stream, stream.clock))
    for on_host in (0.05, 0.2, 0.45):
        assert [clock("way", stream.kernel(on_host, 0.6)) for _ in range(3)] == pytest.approx([0.6] * 3)
    assert stream.held == pytest.approx([2 * 0.5 + SLACK] * 9)
