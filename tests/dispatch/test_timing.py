"""The order of rounds, the median, time apart from launches, company; the GPU's clock on a GPU."""

import threading

import pytest
import torch

from tests.dispatch.simulated_stream import FLUSH, NeverHeld, SimulatedStream
from tpkernels.dispatch import timing
from tpkernels.dispatch.autotune import winner
from tpkernels.dispatch.checking import scratch_like
from tpkernels.dispatch.timing import SLACK, StreamClock, is_quiet, rounds, time_on
from tpkernels.reserved_sms import Reservation, ReservedSms

CPU = torch.device("cpu")


def test_candidates_take_turns_and_outliers_do_not_count():
    order = []
    rounds(list("abc"), lambda name: order.append(name) or 1.0, clock=lambda: 0.0)
    assert "".join(order[:9]) == "abcbcacab"
    assert len(order) == 3 * timing.MOST_ROUNDS
    times = iter([1.0, 100.0, 1.0, 1.0, 1.0] * timing.MOST_ROUNDS)
    assert rounds(["a"], lambda name: next(times))[0] == {"a": 1.0}


def test_there_are_at_least_15_rounds_however_long_they_take():
    ticks = iter([0.0, *(timing.SECONDS + i for i in range(1, 100))])
    count = []
    rounds(["a"], lambda name: count.append(name) or 1.0, clock=lambda: next(ticks))
    assert len(count) == timing.FEWEST_ROUNDS == 15


# milliseconds of the host and of the GPU: a descriptor is heavier to launch, and its kernel the faster one
TORCH, DESCRIPTOR = (0.02, 0.075), (0.07, 0.05)


def times_on(stream, **kernels):
    runs = {name: stream.kernel(*spent) for name, spent in kernels.items()}
    return time_on(stream, runs, stream.clock)


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
    eager, captured, _ = times_on(SimulatedStream(), torch=(0.02, 0.06), descriptor=DESCRIPTOR)
    assert eager == pytest.approx({"torch": 0.06, "descriptor": 0.07})
    assert captured == pytest.approx({"torch": 0.06, "descriptor": 0.05})


def test_many_launches_cost_what_the_host_takes():
    stream = SimulatedStream()

    def ten_small_ones():
        for _ in range(10):
            stream.enqueue(0.02, 0.005)

    assert time_on(stream, {"ten": ten_small_ones}, stream.clock).eager == pytest.approx({"ten": 0.2})


def test_a_hold_is_as_long_as_launching_took_before():
    """The time between its launch and what it was held for would count as time of the GPU."""
    stream = SimulatedStream()
    clock = StreamClock(stream, stream.clock)
    way = stream.kernel(1.5, 1.6)
    (first, _), *later = [clock("long", way) for _ in range(3)]
    assert first > 1.9
    assert [max(times) for times in later] == pytest.approx([1.6, 1.6])
    launching = 1.5 + stream.launch  # of the first event, too
    assert stream.held == pytest.approx([2 * least + SLACK for least in (0.5, launching, launching)])


def test_a_run_that_was_held_too_shortly_does_not_count():
    stream, launches = SimulatedStream(), []

    def slow_now_and_then():
        launches.append(len(launches))
        stream.enqueue(2.0 if launches[-1] % 5 == 4 else 0.01, 0.05)

    times = time_on(stream, {"kernel": slow_now_and_then}, stream.clock)
    assert times.captured == pytest.approx({"kernel": 0.05})


def test_a_run_that_waits_for_the_gpu_is_timed_all_the_same():
    stream = SimulatedStream()

    def waits():
        stream.enqueue(0.01, 0.05)
        stream.now = stream.done

    times = time_on(stream, {"kernel": waits}, stream.clock).eager
    assert times["kernel"] == pytest.approx(0.05 + 0.01 + FLUSH, abs=0.02)
    assert len(stream.held) == timing.TRIES, "then it is held no more"


class Meeting:
    """Ranks of which the others are held for 5 ms, as a clock of theirs says; a stream that comes waits."""

    def __init__(self, stream, late=5.0):
        self.stream, self.late, self.meetings = stream, late, 0

    def __call__(self):
        self.meetings += 1
        self.stream.done = max(self.stream.done, self.stream.now + self.late)

    def way(self, on_gpu):
        """A transfer, which ends on no rank before all of them have begun."""

        def run():
            others_begin = self.stream.now + self.late
            self.stream.enqueue(0.05, on_gpu)
            self.stream.done = max(self.stream.done, others_begin + on_gpu)

        return run


@pytest.mark.parametrize("meets", [True, False])
def test_ranks_meet_between_the_hold_and_the_first_event(meets):
    """Else a rank would count its wait for one that was held for longer."""
    stream = SimulatedStream()
    meeting = Meeting(stream)
    clock = StreamClock(stream, stream.clock, meeting if meets else None)
    measured = [max(clock("way", meeting.way(0.6))) for _ in range(3)]
    if meets:
        assert measured == pytest.approx([0.6 + 0.05] * 3, abs=0.06)
        assert meeting.meetings == 3
    else:
        assert min(measured) > 3.0


def chosen_with_noise(seed, fewest, margin):
    """Of two kernels that are equally fast, on a GPU whose times vary by 1.5 %."""
    stream = SimulatedStream(noise=0.015, seed=seed)
    runs = {"torch": stream.kernel(0.01, 1.0), "ours": stream.kernel(0.01, 1.0)}
    once = StreamClock(stream, stream.clock)
    times, _ = rounds(list(runs), lambda name: max(once(name, runs[name])), exactly=fewest)
    return winner(times, margin=margin)


def test_noise_chooses_nobody():
    """As many rounds as there are at least, and the margin, are each too few alone."""
    seeds = range(300)
    assert [seed for seed in seeds if chosen_with_noise(seed, timing.FEWEST_ROUNDS, 0.03) == "ours"] == []
    assert [seed for seed in seeds if chosen_with_noise(seed, 5, 0.03) == "ours"]
    assert [seed for seed in seeds if chosen_with_noise(seed, timing.FEWEST_ROUNDS, 0.0) == "ours"]


def test_timing_begins_when_nothing_is_in_flight():
    stream = SimulatedStream(in_flight=1e3)  # a collective of a second
    times = times_on(stream, torch=TORCH)
    assert times.captured == pytest.approx({"torch": 0.075})
    assert times.company == ""


def test_work_that_does_not_end_is_company():
    times = times_on(SimulatedStream(in_flight=1e9), torch=TORCH)
    assert times.captured == pytest.approx({"torch": 0.15}), "half of the SMs"
    assert times.company == "work that did not end within 2 s"


def test_times_that_spread_are_company():
    assert times_on(SimulatedStream(noise=0.02), torch=TORCH).company == ""
    company = times_on(SimulatedStream(noise=0.4), torch=TORCH).company
    assert company.startswith("work that is not ours: times spread by ")
    stream = SimulatedStream()
    jitter = iter([0.2, 0.02, 0.4] * 100)  # of a busy host
    times = time_on(stream, {"torch": lambda: stream.enqueue(next(jitter), 0.075)}, stream.clock)
    assert times.company == ""
    # what an event cannot tell apart is none
    assert times_on(SimulatedStream(noise=0.4), torch=(0.0, 0.002)).company == ""


def test_a_collective_that_begins_meanwhile_is_company_and_keeps_its_sms(monkeypatch):
    writer, of_group = ReservedSms(), Reservation(8, 66)
    setting, seen = torch._C._get_sm_carveout_experimental, []
    monkeypatch.setattr(timing, "torchs_settings", lambda: writer)

    def once(name):
        if not seen:
            writer.begin(of_group)  # by another thread
        seen.append(setting())
        return 1.0

    writer.begin(of_group)
    assert rounds(["a"], once)[1] == "a collective that began meanwhile"
    assert set(seen) == {None}
    assert setting() == 16
    assert rounds(["a"], lambda name: 1.0)[1] == ""
    writer.end(of_group)
    writer.end(of_group)
    assert setting() is None


def test_a_device_that_is_busy_for_long_is_not_waited_for(monkeypatch):
    """A receive that is posted ahead ends when this rank goes on."""
    goes_on, cuda = threading.Event(), torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: goes_on.wait(20))
    assert not is_quiet(cuda, seconds=0.05)
    goes_on.set()
    assert is_quiet(cuda, seconds=20)
    assert is_quiet(CPU)


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
