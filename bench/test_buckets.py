"""Gradient buckets against the faster form of DDP and a loop of all-reduces, on gloo ranks of one machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.cases.buckets import (
    construction_case,
    hooks_case,
    list_case,
    step_case,
    step_over_gloo,
    with_better_ddp,
)
from bench.conftest import Bench
from tests.ranks import RankPool

FORMS = ("ours", "naive", "ddp_views")
ALL = (*FORMS, "loop")


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.smoke), 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    if request.param == 2:
        yield request.getfixturevalue("ranks2")
    else:
        with RankPool(request.param) as pool:
            yield pool


def test_small_step(bench: Bench, ranks: RankPool) -> None:
    measured = bench.on_ranks(ranks, step_case, "400_small", ALL, rounds=25)
    bench.record(with_better_ddp(measured))


@pytest.mark.smoke
@pytest.mark.parametrize("bfloat16", [False, True], ids=["float32", "bfloat16"])
def test_small_step_over_gloo(bench: Bench, ranks2: RankPool, bfloat16: bool) -> None:
    measured = bench.on_ranks(ranks2, step_over_gloo, "400_small", bfloat16, rounds=25)
    bench.record(with_better_ddp(measured))


def test_list(bench: Bench, ranks: RankPool) -> None:
    bench.record(bench.on_ranks(ranks, list_case, "400_small", rounds=25))


def test_construction(bench: Bench, ranks: RankPool) -> None:
    measured = bench.on_ranks(ranks, construction_case, "400_small", FORMS, rounds=20)
    bench.record(with_better_ddp(measured))


def test_hooks(bench: Bench, ranks: RankPool) -> None:
    bench.record(bench.on_ranks(ranks, hooks_case, rounds=31))


@pytest.mark.parametrize("world", [2, 4])
def test_large_step(bench: Bench, world: int) -> None:
    names = ALL if world == 2 else ("ours", "naive")  # four ranks with all ways would need 20 GB
    with RankPool(world) as pool:
        rounds = 30 // world
        measured = bench.on_ranks(pool, step_case, "gpt2_small", names, rounds=rounds, timeout=500)
        bench.record(with_better_ddp(measured))
