"""Time lines: what a counter of bytes says of pieces, and what a trace holds."""

from __future__ import annotations

import pytest

from bench.cases import linear_timeline
from bench.slow_link import SlowLink, why_not
from bench.timeline import Sample, chrome_trace, pieces_received
from tpkernels.pictures.lanes import Span

SPANS = [
    Span(0, "computes", "own rows", 5.0, 5.3),
    Span(0, "receives", "piece 1", 5.1, 5.2),
    Span(0, "receives", "piece <2>", 5.2, 5.21),
    Span(1, "computes", "all rows", 5.05, 5.4),
]


def test_pieces_are_cut_from_a_counter_of_bytes():
    rising = [Sample(10 + 0.01 * step, 500 + 100 * max(0, step - 100)) for step in range(201)]
    idle = [Sample(12 + 0.01 * step, rising[-1].received + 5 * step // 100) for step in range(1, 101)]
    first, second = pieces_received(1, rising + idle, [30, 10])
    assert (first.rank, first.name, second.name) == (1, "piece 1", "piece 2")
    assert first.start == pytest.approx(11.0, abs=0.03)  # not when counting began
    assert first.stop == second.start == pytest.approx(11.75, abs=0.03)
    assert second.stop == pytest.approx(12.0, abs=0.03)  # not with the few bytes that come long after


def test_a_trace_has_a_thread_for_each_lane_and_starts_at_zero():
    events = chrome_trace({"at once": SPANS})["traceEvents"]
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {"at once", "rank 0 computes", "rank 0 receives", "rank 1 computes"}
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == len(SPANS)
    assert min(event["ts"] for event in spans) == 0
    assert {event["name"]: event["dur"] for event in spans}["own rows"] == pytest.approx(3e5)


reason = why_not()


@pytest.mark.skipif(reason is not None, reason=reason or "")
def test_a_call_is_recorded_on_both_ranks():
    with SlowLink(1e9) as link:
        by_rank = link.run(linear_timeline.record, "column", 1.0, 1, timeout=120)
    for rank, panels in enumerate(by_rank):
        assert set(panels) == set(linear_timeline.PANELS)
        for title, overlap in linear_timeline.PANELS.items():
            spans = panels[title]
            assert {span.rank for span in spans} == {rank}
            computing = [span for span in spans if span.doing == "computes"]
            receiving = [span for span in spans if span.doing == "receives"]
            assert [span.name for span in receiving] == [f"piece {number}" for number in (1, 2, 3, 4)]
            assert len(computing) == (5 if overlap else 1)
            assert (computing[0].start < receiving[-1].start) == overlap
