"""Layers split over gloo ranks of this machine, against the same with collectives that block.

A loopback link is quick: what shows here is what overlapping costs. What it hides on a slow link is for
`test_overlap.py`.
"""

from __future__ import annotations

import pytest

from bench.cases.parallel import CASES, case_of
from bench.conftest import Bench
from tests.ranks import RankPool


@pytest.mark.smoke
@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sequence_parallel", "plain"])
@pytest.mark.parametrize("name", CASES)
def test_parallel(bench: Bench, ranks2: RankPool, name: str, sequence_parallel: bool) -> None:
    bench.record(bench.on_ranks(ranks2, case_of, name, sequence_parallel, rounds=31))
