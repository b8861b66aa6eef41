"""Steps of the demo on two ranks: our trainer against torch's tensor parallelism and torch's AdamW."""

from __future__ import annotations

from collections.abc import Callable

from bench.case import Work, timed_on_ranks
from bench.cases.training import demo_config, training_case
from bench.measure import Seconds
from tests.ranks import RankPool


def test_step(record: Callable[[Work, Seconds], None], ranks2: RankPool) -> None:
    record(*timed_on_ranks(ranks2, training_case, demo_config(), rounds=40, timeout=300))
