"""The arithmetic of the emulated link, and the link itself where there is a GPU."""

from __future__ import annotations

import pytest

from bench.cases.overlap import Times, predicted, problems, rows_to_copy


def test_efficiency_is_one_for_all_hidden_and_zero_for_nothing():
    times = Times(product=10.0, transfer=4.0, sequential=14.0, overlapped=10.0, control=14.0)
    assert times.efficiency == 1.0
    assert times.control_efficiency == 0.0
    slow_link = Times(product=10.0, transfer=20.0, sequential=30.0, overlapped=25.0, control=30.0)
    assert slow_link.efficiency == 0.5


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_the_model_hides_what_comes_in_time_and_exposes_the_rest(parts):
    assert predicted(10.0, 0.0, parts) == pytest.approx(10.0)
    assert predicted(10.0, 5.0, parts) == pytest.approx(10.0)  # here when the own rows are done, part by part
    late = predicted(10.0, 30.0, parts)
    assert late == pytest.approx(30.0 + 5.0 / parts)  # the link is the bottleneck: the last part comes on top
    assert predicted(10.0, 0.0, parts, delay=100.0) == pytest.approx(105.0)


def test_rows_are_scaled_to_the_time_wanted():
    assert rows_to_copy(512, 1.0, 4.0) == 128
    assert rows_to_copy(512, 9.0, 4.0) == 512
    assert rows_to_copy(512, 1e-9, 4.0) == 1


def test_a_control_that_hides_something_makes_the_run_worthless():
    sound = {"efficiency": 0.9, "control_efficiency": 0.05}
    assert problems([sound]) == []
    assert "hid 0.40" in problems([sound, sound | {"control_efficiency": 0.4}])[0]
    assert problems([{"error": "copies do not proceed"}]) == ["copies do not proceed"]
