"""Steps of the demo on two ranks: our trainer against torch's tensor parallelism and torch's AdamW."""

from __future__ import annotations

import os

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from bench.cases.training import demo_config, time_training
from bench.measure import Comparison, slowest
from tests.ranks import RankPool

RANKS, CHECKED, ROUNDS = 2, 4, 40


@pytest.mark.benchmark(group="training step")
def test_step(benchmark: BenchmarkFixture) -> None:
    with RankPool(RANKS) as ranks:
        answers = ranks.run(time_training, demo_config(), CHECKED, ROUNDS, timeout=300)
    for ours, torchs in answers[0].losses:  # else there is nothing to compare
        assert ours == pytest.approx(torchs, rel=1e-5)
    seconds = slowest([answer.seconds for answer in answers])
    comparison = Comparison(seconds["ours"], seconds["torch"])
    # what others take from us on a busy machine counts in the one, not in the other
    on_processor = slowest([answer.processor_seconds for answer in answers])
    processor = Comparison(on_processor["ours"], on_processor["torch"])
    info = {f"processor {name}": value for name, value in processor.as_info().items()}
    benchmark.extra_info.update(comparison.as_info(), **info, load=os.getloadavg()[0])
    print(f"\ntraining step, {RANKS} ranks: ours against torch's: {comparison}")
    print(f"in processor time: {processor}; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    benchmark.pedantic(lambda: None)  # type: ignore[no-untyped-call]  # timed above, on the ranks
