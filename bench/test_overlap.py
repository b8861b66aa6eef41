"""How much of communication is hidden, on a link as slow as the computation. Needs root and iproute2."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from bench.case import Work
from bench.cases import bucket_overlap
from bench.cases.linear_overlap import listed, measure
from bench.measure import Seconds
from bench.slow_link import SlowLink, why_not

Record = Callable[[Work, Seconds], None]


@pytest.fixture(scope="module")
def link() -> Iterator[SlowLink]:
    if reason := why_not():
        pytest.skip(reason)
    with SlowLink(bits_per_second=1e9) as link:
        yield link


@pytest.mark.parametrize("megabits", [200, 400, 800])
def test_gradient_buckets(link: SlowLink, record: Record, megabits: float) -> None:
    work, seconds = link.run(bucket_overlap.measure, megabits, timeout=300)[0]
    print(f"\n{work}: {bucket_overlap.listed(seconds)}; load {os.getloadavg()[0]:.1f}")
    record(work, seconds)


@pytest.mark.parametrize("megabits", [100, 150, 200, 300])
@pytest.mark.parametrize(
    "case",
    ["column forward", "row forward", "column backward", "row backward"],
    ids=lambda c: c.replace(" ", "_"),
)
def test_linear(link: SlowLink, record: Record, case: str, megabits: float) -> None:
    work, seconds = link.run(measure, case, megabits, timeout=300)[0]
    print(f"\n{case}: {listed(seconds)}")
    record(work, seconds)
