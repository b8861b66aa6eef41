"""Times candidates on a GPU.

Times are medians of rounds in which every candidate runs once, in turns, so that a drift of clocks or a busy
neighbour hits all alike. Eagerly a run counts as the longer of its time on the GPU and its time on the host:
a launch that takes longer than what it launches is what a small product costs. A captured graph is replayed
without the host, so there a run counts as its time on the GPU.

The two are measured apart. For each run the stream gets

    hold        until the host has enqueued all that follows
    flush       the L2 cache is overwritten, as the rest of a model would do
    event
    the run
    event

Without the hold the first event would pass while the host still launches: the GPU would idle between the
events, and a candidate would pay for its launch a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from statistics import median
from time import perf_counter
from typing import NamedTuple, Protocol, cast

import torch

Timeable = Callable[[], object]
Runs = Mapping[str, Timeable]
Clock = Callable[[str, Timeable], float]  # milliseconds of one run of a name; runs it once


class Times(NamedTuple):
    """Milliseconds of each candidate, by its name."""

    eager: Mapping[str, float]  # the longer of the GPU's and the host's
    captured: Mapping[str, float]  # the GPU's


Timer = Callable[[Runs], Times]

WARM_UPS = 3
FEWEST_ROUNDS, MOST_ROUNDS = 5, 25
SECONDS = 0.5  # after these no further round begins

SLACK = 0.1  # milliseconds of a hold beyond twice what launching took before
TRIES = 4  # of a run that was not held long enough, each held longer


def rounds(
    names: list[str],
    once: Callable[[str], float],
    clock: Callable[[], float] = perf_counter,
    *,
    exactly: int = 0,
) -> dict[str, float]:
    """Return the median over rounds of `once(name)`, for each name; another name goes first in each round.

    exactly: so many rounds, however long they take
    """
    samples: dict[str, list[float]] = {name: [] for name in names}
    began = clock()
    with _all_processors():
        for i in range(exactly or MOST_ROUNDS):
            first = i % len(names)
            for name in (*names[first:], *names[:first]):
                samples[name].append(once(name))
            if not exactly and i + 1 >= FEWEST_ROUNDS and clock() - began > SECONDS:
                break
    return {name: median(values) for name, values in samples.items()}


@contextmanager
def _all_processors() -> Iterator[None]:
    """Let products take all processors, even beside a collective: other calls use the choice, too."""
    left_free = torch._C._get_sm_carveout_experimental()
    torch._C._set_sm_carveout_experimental(None)
    try:
        yield
    finally:
        torch._C._set_sm_carveout_experimental(left_free)


class TimedStream(Protocol):
    """A stream as timing needs it. Each method enqueues work and returns at once."""

    def hold(self, milliseconds: float) -> None:
        """Delay the work that follows."""

    def flush(self) -> None:
        """Overwrite the L2 cache."""

    def mark(self) -> Mark: ...


class Mark(Protocol):
    """A point in a stream, as torch's events are."""

    def record(self) -> None: ...

    def query(self) -> bool:
        """Whether the stream has reached it."""

    def synchronize(self) -> None: ...

    def elapsed_time(self, end_event: Mark) -> float:
        """Return the milliseconds from this mark to a later one."""


class StreamTimer:
    """Times candidates on a stream, in rounds."""

    def __init__(self, stream: TimedStream, clock: Callable[[], float] = perf_counter) -> None:
        self._stream, self._clock = stream, clock
        self._launching: dict[str, float | None] = {}  # milliseconds; None: the run itself waits for the GPU

    def __call__(self, runs: Runs) -> Times:
        for name, run in runs.items():
            for _ in range(WARM_UPS):
                began = self._clock()
                run()
                self._launching[name] = self._since(began)  # of the last: the first may compile
        on_gpu: dict[str, list[float]] = {name: [] for name in runs}

        def once(name: str) -> float:
            of_gpu, of_host = self._once(name, runs[name])
            on_gpu[name].append(of_gpu)
            return max(of_gpu, of_host)

        eager = rounds(list(runs), once, self._clock)
        return Times(eager, {name: median(samples) for name, samples in on_gpu.items()})

    def _once(self, name: str, run: Timeable) -> tuple[float, float]:
        for _ in range(TRIES):
            launching = self._launching[name]
            on_gpu, on_host, held = self.measured(run, launching)
            if held or launching is None:
                return on_gpu, on_host
            self._launching[name] = on_host
        self._launching[name] = None
        return self._once(name, run)

    def measured(self, run: Timeable, launching: float | None) -> tuple[float, float, bool]:
        """Return milliseconds on GPU and host, and whether the host was done before the GPU began."""
        start, end = self._stream.mark(), self._stream.mark()
        if launching is not None:
            self._stream.hold(2 * launching + SLACK)
        self._stream.flush()
        start.record()
        began = self._clock()
        run()
        on_host = self._since(began)
        end.record()
        held = not start.query()
        end.synchronize()
        return start.elapsed_time(end), on_host, held

    def _since(self, began: float) -> float:
        return 1e3 * (self._clock() - began)


class StreamClock:
    """Times runs that all ranks make together, one at a time: the longer of its times on GPU and host.

    All of them run it equally often: a run that was not held for long enough is not repeated.
    """

    # Milliseconds. Nearly all ways are launched in less, and so held equally long on all ranks: a rank that
    # held its stream for less than the others would count its wait for them.
    LEAST_LAUNCHING = 0.5
    TRIES = 3  # to hold a way for as long as launching it takes

    def __init__(self, timer: StreamTimer) -> None:
        self._timer = timer
        self._launching: dict[str, float] = {}  # of the last run of each way
        self._missed: dict[str, int] = {}  # so many runs of it in turn were not held for long enough

    def __call__(self, name: str, run: Timeable) -> float:
        launching = max(self.LEAST_LAUNCHING, self._launching.get(name, 0.0))
        on_gpu, on_host, held = self._timer.measured(run, launching)
        self._missed[name] = 0 if held else self._missed.get(name, 0) + 1
        # a run that waits for its stream on the host is never held, and would double the hold each time
        self._launching[name] = on_host if self._missed[name] < self.TRIES else self.LEAST_LAUNCHING
        return max(on_gpu, on_host)


class CudaStream:
    """The current stream of the current device."""

    CYCLES = 1_000_000  # of a sleep that shows how long they take

    def __init__(self, device: torch.device) -> None:
        cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self._flushed = torch.empty(2 * cache_bytes, dtype=torch.int8, device=device)
        start, end = self.mark(), self.mark()
        start.record()
        torch.cuda._sleep(self.CYCLES)
        end.record()
        end.synchronize()
        self._cycles = self.CYCLES / start.elapsed_time(end)  # in a millisecond

    def hold(self, milliseconds: float) -> None:
        torch.cuda._sleep(int(milliseconds * self._cycles))

    def flush(self) -> None:
        self._flushed.zero_()

    def mark(self) -> Mark:
        return cast("Mark", torch.cuda.Event(enable_timing=True))


class CudaTimer:
    """Times candidates on the current stream of a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, runs: Runs) -> Times:
        with torch.cuda.device(self._device):
            return StreamTimer(CudaStream(self._device))(runs)


def cuda_clock(device: torch.device) -> Clock:
    """Make a StreamClock on the current stream of a device, for one choice: its memory is not kept."""
    with torch.cuda.device(device):
        clock = StreamClock(StreamTimer(CudaStream(device)))

    def once(name: str, run: Timeable) -> float:
        with torch.cuda.device(device):
            return clock(name, run)

    return once
