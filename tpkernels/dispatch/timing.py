"""Times candidates on a GPU that does nothing else.

Nothing of this process is in flight when timing begins; work that does not end is company, and is reported
with the times. Times are medians of rounds in which every candidate runs once, in turns, so that a drift of
clocks or another process hits all alike. Eagerly a run counts as the longer of its time on the GPU and its
time on the host: a launch that takes longer than what it launches is what a small product costs. A captured
graph is replayed without the host, so there a run counts as its time on the GPU.

The two are measured apart. For each run the stream gets

    hold        until the host has enqueued all that follows
    flush       the L2 cache is overwritten, as the rest of a model would do
    meeting     of the ranks, where all of them run it together
    event
    the run
    event

Without the hold the first event would pass while the host still launches: the GPU would idle between the
events, and a candidate would pay for its launch a second time. Without the meeting a rank that was held for
less would count its wait for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from statistics import median, quantiles
from threading import Event, Thread
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import torch

from tpkernels.reserved_sms import torchs_settings

Timeable = Callable[[], object]
Clock = Callable[[str, Timeable], tuple[float, float]]  # milliseconds of one run, on the GPU and on the host

WARM_UPS = 3
FEWEST_ROUNDS, MOST_ROUNDS = 15, 25
SECONDS = 0.5  # after these no further round begins
SLACK = 0.1  # milliseconds of a hold beyond twice what launching took before
LEAST_LAUNCHING = 0.5  # milliseconds that launching is expected to take
TRIES = 3  # to hold a run for as long as launching it takes
QUIET_SECONDS = 2.0  # for what is in flight to end
# Half of a candidate's times lie within this part of their median, or 2 us, which are an event's precision:
# on a GPU alone 1 to 3 % are usual.
SPREAD, LEAST_SPREAD = 0.1, 2e-3


class Times(NamedTuple):
    """Milliseconds of each candidate, by its name."""

    eager: Mapping[str, float]  # the longer of the GPU's and the host's
    captured: Mapping[str, float]  # the GPU's
    company: str = ""  # what else ran


Timer = Callable[[Mapping[str, Timeable]], Times]


def rounds(
    names: Sequence[str],
    once: Callable[[str], float],
    clock: Callable[[], float] = perf_counter,
    *,
    is_quiet: Callable[[], bool] = lambda: True,
    exactly: int = 0,
) -> tuple[dict[str, float], str]:
    """Return the median over rounds of `once(name)`, for each name, and what else ran, or "".

    Another name goes first in each round. exactly: so many rounds, however long they take
    """
    samples: dict[str, list[float]] = {name: [] for name in names}
    company = "" if is_quiet() else f"work that did not end within {QUIET_SECONDS:g} s"
    began = clock()
    with _all_sms() as has_begun:
        for i in range(exactly or MOST_ROUNDS):
            first = i % len(names)
            for name in (*names[first:], *names[:first]):
                samples[name].append(once(name))
            if not exactly and i + 1 >= FEWEST_ROUNDS and clock() - began > SECONDS:
                break
        if has_begun():
            company = company or "a collective that began meanwhile"
    return {name: median(values) for name, values in samples.items()}, company


def _noise(samples: Iterable[Sequence[float]]) -> str:
    """Say how far the GPU's times of the steadiest candidate spread, if that is too far; "" if not."""
    spreads = []
    for values in samples:
        low, middle, high = quantiles(values, n=4)
        spreads.append((high - low) / max(middle, LEAST_SPREAD / SPREAD))
    return f"work that is not ours: times spread by {min(spreads):.0%}" if min(spreads) > SPREAD else ""


@contextmanager
def _all_sms() -> Iterator[Callable[[], bool]]:
    """Reserve no SMs, and prefer no library, even beside a collective: other calls use the choice, too.

    What the user has set stays. Yields a function that says whether another thread has reserved some since.
    """
    settings = torchs_settings()
    before = settings.begun()
    settings.pause(True)
    try:
        yield lambda: settings.begun() != before
    finally:
        settings.pause(False)


def is_quiet(device: torch.device, seconds: float = QUIET_SECONDS) -> bool:
    """Wait until a GPU has ended all that this process enqueued; False if it has not after some seconds.

    A thread waits: what is in flight may be a receive whose sender waits for this rank.
    """
    if device.type != "cuda":
        return True
    ended = Event()

    def wait() -> None:
        with suppress(RuntimeError):  # of the GPU: it is raised again by the first call that follows
            torch.cuda.synchronize(device)
        ended.set()

    Thread(target=wait, daemon=True).start()
    return ended.wait(seconds)


class TimedStream(Protocol):
    """A stream as timing needs it. `hold` and `flush` enqueue work and return at once."""

    def is_quiet(self) -> bool:
        """Wait until nothing is in flight on its device; False if that takes too long."""

    def hold(self, milliseconds: float) -> None:
        """Delay the work that follows."""

    def flush(self) -> None:
        """Overwrite the L2 cache."""

    def mark(self) -> Any:
        """Enqueue a point that has the methods of torch's events."""


class StreamClock:
    """Times single runs on a stream: milliseconds on the GPU, and on the host."""

    def __init__(
        self, stream: TimedStream, clock: Callable[[], float] = perf_counter, meet: Timeable | None = None
    ) -> None:
        """meet: enqueues a meeting of all ranks that run the same"""
        self._stream, self._clock, self._meet = stream, clock, meet
        self._launching: dict[str, float] = {}  # of the last run of each name
        self._missed: dict[str, int] = {}  # so many runs of it in turn were not held for long enough

    def __call__(self, name: str, run: Timeable) -> tuple[float, float]:
        missed = self._missed.get(name, 0)
        if missed < TRIES:  # else it waits for its stream, and would be held longer each time
            self._stream.hold(2 * max(LEAST_LAUNCHING, self._launching.get(name, 0.0)) + SLACK)
        self._stream.flush()
        enqueuing = self._clock()
        if self._meet is not None:
            self._meet()
        start = self._stream.mark()
        began = self._clock()
        run()
        ended, end = self._clock(), self._stream.mark()
        self._launching[name], on_host = 1e3 * (ended - enqueuing), 1e3 * (ended - began)
        self._missed[name] = missed + 1 if start.query() else 0
        end.synchronize()
        return float(start.elapsed_time(end)), on_host


def time_on(
    stream: TimedStream, runs: Mapping[str, Timeable], clock: Callable[[], float] = perf_counter
) -> Times:
    """Time candidates on a stream."""
    once = StreamClock(stream, clock)
    on_gpu: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        for _ in range(WARM_UPS):
            run()

    def longer(name: str) -> float:
        of_gpu, of_host = once(name, runs[name])
        on_gpu[name].append(of_gpu)
        return max(of_gpu, of_host)

    eager, company = rounds(list(runs), longer, clock, is_quiet=stream.is_quiet)
    captured = {name: median(samples) for name, samples in on_gpu.items()}
    return Times(eager, captured, company or _noise(on_gpu.values()))


class CudaStream:
    """The current stream of a device."""

    CYCLES = 1_000_000  # of a sleep that shows how long they take

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self._flushed = torch.empty(2 * cache_bytes, dtype=torch.int8, device=device)
        self._cycles = float(self.CYCLES)  # in a millisecond
        start = self.mark()
        self.hold(1.0)
        end = self.mark()
        end.synchronize()
        self._cycles = self.CYCLES / start.elapsed_time(end)

    def is_quiet(self) -> bool:
        return is_quiet(self._stream.device)

    def hold(self, milliseconds: float) -> None:
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(int(milliseconds * self._cycles))

    def flush(self) -> None:
        self._flushed.zero_()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event
