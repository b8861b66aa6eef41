"""How much of communication is hidden behind computation, on a link as slow as the computation.

Three ways to do a piece of work are timed in turn: computing only, both one after the other, and both at
once. `Overlap` makes the share out of them. A case is a function for ranks of `bench.slow_link`.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.case import Case, Work
from bench.measure import Way
from bench.slow_link import throttle
from tpkernels import GradientBuckets


@dataclass(frozen=True)
class Overlap:
    """Seconds of each round, by the slowest rank."""

    computing: list[float]
    in_turn: list[float]
    at_once: list[float]

    @property
    def shares(self) -> list[float]:
        """What is saved, in parts of the communication's time, by round."""
        rounds = zip(self.computing, self.in_turn, self.at_once, strict=True)
        return sorted((in_turn - at_once) / (in_turn - computing) for computing, in_turn, at_once in rounds)

    @property
    def share(self) -> float:
        return statistics.median(self.shares)

    @property
    def balance(self) -> float:
        """Communication in parts of the computation's time."""
        return statistics.median(self.in_turn) / statistics.median(self.computing) - 1

    def __str__(self) -> str:
        low, _, high = statistics.quantiles(self.shares, n=4)
        times = ", ".join(
            f"{name} {1e3 * statistics.median(seconds):.0f} ms" for name, seconds in vars(self).items()
        )
        return (
            f"{100 * self.share:.0f} % hidden ({100 * low:.0f} to {100 * high:.0f} in the middle half of "
            f"{len(self.shares)} rounds; {times}; communication / computing {self.balance:.2f})"
        )


@dataclass(frozen=True)
class Ways:
    """What is timed, and what is done before each time without being timed."""

    prepare: Way
    computing: Way
    in_turn: Way
    at_once: Way

    def measure(self, wire_bytes: int, rounds: int) -> Overlap:
        """On every rank: throttle the link so that `wire_bytes` take as long as computing, and time."""
        ways = [self.computing, self.in_turn, self.at_once]
        for way in (self.at_once, *ways):  # the first step of buckets teaches them their order
            self._seconds(way)
        computing = statistics.median(self._seconds(self.computing) for _ in range(5))
        rate = 8 * wire_bytes / computing
        for _ in range(2):  # a link is slower than asked: packets have headers, and hosts work
            throttle(rate)
            rate *= statistics.median(self._seconds(self.in_turn) for _ in range(3)) / computing - 1
        throttle(rate)
        seconds: list[list[float]] = [[], [], []]
        for round_ in range(rounds):
            for position in range(3):
                number = (round_ + position) % 3
                seconds[number].append(self._seconds(ways[number]))
        return Overlap(*seconds)

    def _seconds(self, way: Way) -> float:
        """Of the slowest rank, known to all."""
        self.prepare()
        dist.barrier()
        start = time.perf_counter()
        way()
        seconds = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return seconds.item()


def gradient_buckets(rounds: int) -> tuple[Work, Overlap]:
    """Backward of 24 layers of 1 MiB, in buckets of 1 MiB: about as many as a large model has of 25 MiB."""
    group = dist.group.WORLD
    assert group is not None
    torch.manual_seed(0)
    layers = [layer for _ in range(24) for layer in (nn.Linear(512, 512, bias=False), nn.ReLU())]
    model = nn.Sequential(*layers)
    x = torch.randn(2048, 512)
    buckets = GradientBuckets(model, group, bucket_bytes=2**20)
    losses: list[torch.Tensor] = []

    def forward() -> None:
        buckets.zero()
        losses[:] = [model(x).square().mean()]

    def backward() -> None:
        losses[0].backward()

    def computing() -> None:
        with buckets.no_sync():
            backward()

    def in_turn() -> None:
        computing()
        buckets.finish()

    def at_once() -> None:
        backward()
        buckets.finish()

    def gradients(way: Way) -> list[Tensor]:
        forward()
        way()
        return [bucket.clone() for bucket in buckets.buckets]

    work = Work(
        op="gradient_buckets",
        shape="24x512x512-slow_link-world2",
        pass_="backward",
        naive="backward, then the reduction",
        world=2,
        flops=24 * 2 * 2 * 2048 * 512 * 512,
        # of two ranks, each sends as much as it has
        wire_bytes=sum(bucket.nbytes for bucket in buckets.buckets),
    )
    Case(work, {"ours": lambda: gradients(at_once), "naive": lambda: gradients(in_turn)}).check()
    assert work.wire_bytes is not None
    return work, Ways(forward, computing, in_turn, at_once).measure(work.wire_bytes, rounds)
