"""Gradient buckets against the faster form of DDP and a loop of all-reduces, on gloo ranks of one machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from bench.case import Work, timed_on_ranks
from bench.cases.buckets import bytes_on_the_wire, list_case, step_case, with_better_ddp
from bench.measure import Seconds
from tests.ranks import RankPool

Record = Callable[[Work, Seconds], None]
ALL = ("ours", "naive", "ddp_views", "loop")


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.smoke), 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    with RankPool(request.param) as pool:
        yield pool


def test_small_step(record: Record, ranks: RankPool) -> None:
    work, seconds = timed_on_ranks(ranks, step_case, "400_small", ALL, rounds=25)
    record(work, with_better_ddp(seconds))


def test_list(record: Record, ranks: RankPool) -> None:
    record(*timed_on_ranks(ranks, list_case, "400_small", rounds=25))


@pytest.mark.parametrize("world", [2, 4])
def test_large_step(record: Record, world: int) -> None:
    names = ALL if world == 2 else ("ours", "naive")  # four ranks with all ways would need 20 GB
    with RankPool(world) as pool:
        rounds = 30 // world
        work, seconds = timed_on_ranks(pool, step_case, "gpt2_small", names, rounds=rounds, timeout=500)
        record(work, with_better_ddp(seconds))


@pytest.mark.parametrize("list_name", ["gpt2_small", "400_small"])
@pytest.mark.parametrize("wire_dtype", [None, torch.bfloat16], ids=["float32", "bfloat16"])
def test_bytes(ranks2: RankPool, list_name: str, wire_dtype: torch.dtype | None) -> None:
    """Not timed: alignment adds little to what travels."""
    sent, gradients, collectives = ranks2.run(bytes_on_the_wire, list_name, wire_dtype, timeout=100)[0]
    print(f"\n{list_name}, {wire_dtype}: {sent} bytes in {collectives} collectives, gradients {gradients}")
    assert sent <= 1.02 * gradients * (wire_dtype or torch.float32).itemsize / 4
