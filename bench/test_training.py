"""Steps of the demo on two ranks: our trainer against torch's tensor parallelism and torch's AdamW."""

from __future__ import annotations

from bench.cases.training import demo_config, training_case
from bench.conftest import Bench
from tests.ranks import RankPool


def test_step(bench: Bench, ranks2: RankPool) -> None:
    bench.record(bench.on_ranks(ranks2, training_case, demo_config(), rounds=40, timeout=300))
