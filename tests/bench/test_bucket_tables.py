"""What is told of gradient buckets: against the faster form of DDP, and against a measured floor."""

import pytest

from bench.cases.bucket_overlap import efficiency, hidden, listed
from bench.cases.buckets import low, with_better_ddp

ROUNDS = 20


def seconds(**milliseconds):
    """Rounds of which a tenth take less than this, and the others much more."""
    return {
        way: [1e-3 * of, 1e-3 * of, *[1.0 + of] * (ROUNDS - 3), 1e-3 * of] for way, of in milliseconds.items()
    }


def test_low_is_what_a_tenth_of_rounds_took_less_than():
    assert low([float(round_) for round_ in reversed(range(30))]) == 3.0
    assert low([5.0]) == 5.0


def test_naive_way_is_the_faster_form_of_ddp():
    for copies, views in ((30, 20), (20, 30)):
        told = with_better_ddp(seconds(ours=10, naive=copies, ddp_views=views))
        assert low(told["naive"]) == 20e-3
        assert low(told["ddp_copies"]) == 1e-3 * copies
        assert low(told["ddp_views"]) == 1e-3 * views
    assert low(with_better_ddp(seconds(ours=10, naive=30))["naive"]) == 30e-3


def test_floor_is_what_could_be_saved():
    told = seconds(naive=200, ours=110, alike=120, floor=100, products=90, transfers=95)
    assert efficiency(told, "ours") == pytest.approx(0.9)
    assert hidden(told, "alike") == pytest.approx(80 / 110)
    assert listed(told).startswith("ours: efficiency 0.900, 81.8 % hidden; alike: efficiency 0.800, ")
