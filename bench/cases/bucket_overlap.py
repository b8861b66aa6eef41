"""How much of the reduction of gradients is hidden behind backward, on a throttled link.

Ways are timed in turn: the reduction after backward, during it in buckets as they are laid out, and during it
in buckets of one size. The floor is the same backward and the same bytes at once, neither waiting for the
other. The times of backward and reduction are reported, too.

The model is a large one with buckets of 25 MiB, in which all sizes are divided by 25.
"""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.case import Case, Work
from bench.cases.blocking import world
from bench.cases.linear_overlap import low, seconds_of_slowest
from bench.measure import Seconds, Way, interleave
from bench.slow_link import throttle
from tpkernels import GradientBuckets
from tpkernels.buckets import gradients as buckets_module

LAYERS, WIDTH, TOKENS = 96, 256, 2048  # gradients of 24 MiB
BUCKET, SMALLEST = 2**20, 2**20 // 25  # bytes
ROUNDS = 9


def efficiency(seconds: Seconds, way: str) -> float:
    """What is saved, in parts of what could be."""
    naive, taken, best = (low(seconds[name]) for name in ("naive", way, "floor"))
    return (naive - taken) / (naive - best)


def listed(seconds: Seconds) -> str:
    shares = "; ".join(f"{way}: efficiency {efficiency(seconds, way):.3f}" for way in ("ours", "alike"))
    return f"{shares}; ms, second-lowest of {len(seconds['ours'])} rounds: " + ", ".join(
        f"{name} {1e3 * low(taken):.0f}" for name, taken in seconds.items()
    )


def measure(megabits: float, rounds: int = ROUNDS) -> tuple[Work, Seconds]:
    """On both ranks."""
    ours, alike = (_Backward(smallest) for smallest in (SMALLEST, BUCKET))
    flats = [torch.zeros_like(bucket) for bucket in ours.buckets.buckets]

    def transfers(meanwhile: Way = lambda: None) -> None:
        moving = [dist.all_reduce(flat, async_op=True) for flat in flats]
        meanwhile()
        for each in moving:
            each.wait()

    def in_turn() -> None:
        ours.products()
        ours.buckets.finish()

    work = Work(
        op="gradient_buckets",
        shape=f"{LAYERS}x{WIDTH}x{WIDTH}-slow_link{megabits:g}mbit-world2",
        pass_="backward",
        naive="backward, then the reduction",
        world=2,
        flops=LAYERS * 2 * 2 * TOKENS * WIDTH**2,
        wire_bytes=sum(flat.nbytes for flat in flats),  # of two ranks, each sends as much as it has
    )
    ways = {"ours": ours.gradients, "naive": lambda: ours.gradients(in_turn), "alike": alike.gradients}
    Case(work, ways).check()
    throttle(1e6 * megabits)
    return work, interleave(
        {
            "naive": (ours.forward, in_turn),
            "ours": (ours.forward, ours.at_once),
            "alike": (alike.forward, alike.at_once),
            "floor": (ours.forward, lambda: transfers(ours.products)),
            "products": (ours.forward, ours.products),
            "transfers": (lambda: None, transfers),
        },
        rounds,
        seconds_of_slowest,
    )


class _Backward:
    """Buckets of one model; the first and the last may hold `smallest` bytes."""

    def __init__(self, smallest: int) -> None:
        group = world()
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
        for layer in layers:
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")  # else numbers vanish in 96 layers
        self.model = nn.Sequential(*[part for layer in layers for part in (layer, nn.ReLU())])
        torch.manual_seed(1 + group.rank())  # a sum that is not taken shows
        self.x = torch.rand(TOKENS, WIDTH)
        self.loss = torch.zeros(())
        with patch.object(buckets_module, "SMALLEST_BUCKET_BYTES", smallest):
            self.buckets = GradientBuckets(self.model, group, bucket_bytes=BUCKET)
        self.gradients()  # the first step teaches the order

    def forward(self) -> None:
        self.buckets.zero()
        self.loss = self.model(self.x).square().mean()

    def products(self) -> None:
        with self.buckets.no_sync():
            self.loss.backward()

    def at_once(self) -> None:
        self.loss.backward()
        self.buckets.finish()

    def gradients(self, way: Callable[[], None] | None = None) -> list[Tensor]:
        self.forward()
        (way or self.at_once)()
        return [parameter.grad.clone() for parameter in self.model.parameters() if parameter.grad is not None]
