"""A GPU with one stream, as arithmetic: launches take time of the host, kernels of the GPU, in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from tpkernels.dispatch.timing import QUIET_SECONDS

FLUSH = 0.04  # milliseconds, as 100 MB take on an H100's memory by its data sheet


class SimulatedStream:
    """Milliseconds throughout; `clock` is the host's, in seconds.

    noise: the standard deviation of times of the GPU, as a part of them
    in_flight: until when other work of the process runs
    """

    def __init__(
        self, launch: float = 0.005, noise: float = 0.0, in_flight: float = 0.0, seed: int = 0
    ) -> None:
        self.noise, self.in_flight, self.draw = noise, in_flight, Random(seed)
        self.now = 0.0
        self.done = 0.0  # when the GPU is through with all that it was given
        self.launch = launch
        self.held: list[float] = []

    def clock(self) -> float:
        return self.now / 1e3

    def enqueue(self, on_host: float, on_gpu: float) -> None:
        """A kernel: it begins once it is launched, and those before it have ended."""
        self.now += on_host
        noisy = on_gpu * max(0.2, 1 + self.noise * self.draw.gauss(0, 1))
        beside = 2 if self.now < self.in_flight else 1  # work of which half of the SMs are taken
        self.done = max(self.done, self.now) + beside * noisy

    def kernel(self, on_host: float, on_gpu: float) -> Callable[[], None]:
        return lambda: self.enqueue(on_host, on_gpu)

    def is_quiet(self) -> bool:
        self.now = min(max(self.now, self.in_flight), self.now + 1e3 * QUIET_SECONDS)
        return self.now >= self.in_flight

    def hold(self, milliseconds: float) -> None:
        self.held.append(milliseconds)
        self.enqueue(self.launch, milliseconds)

    def flush(self) -> None:
        self.enqueue(self.launch, FLUSH)

    def mark(self) -> SimulatedMark:
        self.enqueue(self.launch, 0.0)
        return SimulatedMark(self, self.done)


@dataclass
class SimulatedMark:
    stream: SimulatedStream
    at: float

    def query(self) -> bool:
        return self.at <= self.stream.now

    def synchronize(self) -> None:
        self.stream.now = max(self.stream.now, self.at)

    def elapsed_time(self, end_event: SimulatedMark) -> float:
        return end_event.at - self.at


class NeverHeld(SimulatedStream):
    """As if nobody had called for a hold, nor looked whether there was one."""

    def hold(self, milliseconds: float) -> None:
        pass

    def mark(self) -> SimulatedMark:
        return UnlookedAt(self, super().mark().at)


class UnlookedAt(SimulatedMark):
    def query(self) -> bool:
        return False
