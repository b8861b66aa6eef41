"""The slow link: as slow as asked for, and gone without a trace; time lines of calls over it."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from bench.cases import linear_timeline
from bench.slow_link import SlowLink, throttle, why_not
from bench.timeline import Sample, chrome_trace, pieces_received
from tests import ranks
from tests.patience import patient
from tpkernels.pictures.charts import TimeSpan

reason = why_not()
needs_link = pytest.mark.skipif(reason is not None, reason=reason or "")
with_time = pytest.mark.sweep  # a busy machine is slower than the link
MEGABYTES = 2


def pid_and_namespace() -> tuple[int, str]:
    return os.getpid(), os.readlink("/proc/self/ns/net")


def seconds_to_reduce() -> float:
    """Of MEGABYTES, which two ranks exchange: each sends as much as it has."""
    data = torch.ones(MEGABYTES * 2**18)
    dist.barrier()
    start = time.perf_counter()
    dist.all_reduce(data)
    assert data[-1] == 2
    return time.perf_counter() - start


def seconds_at(*rates: float) -> list[float]:
    seconds = []
    for rate in rates:
        throttle(rate)
        seconds.append(seconds_to_reduce())
    return seconds


def die_on_rank_1() -> None:
    if dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()


@pytest.fixture(scope="module")
def link() -> Iterator[SlowLink]:
    with SlowLink(2e8) as link:
        yield link


@needs_link
@with_time
def test_rate_can_be_changed_between_and_within_calls(link: SlowLink) -> None:
    link.set_rate(4e7)
    slow = min(max(link.run(seconds_to_reduce)) for _ in range(2))
    link.set_rate(2e8)
    fast = min(max(link.run(seconds_to_reduce)) for _ in range(2))
    assert slow > 3 * fast
    inside = link.run(seconds_at, 4e7, 2e8)[0]
    assert inside[0] > 3 * inside[1]


@needs_link
def test_ranks_are_apart_from_us_and_from_each_other(link: SlowLink) -> None:
    (_, first), (_, second) = link.run(pid_and_namespace)
    assert len({first, second, os.readlink("/proc/self/ns/net")}) == 3


@needs_link
def test_nothing_is_left_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "GRACE_SECONDS", 0.5)
    with SlowLink(1e9) as link:
        places = link.run(pid_and_namespace)
        with pytest.raises(RuntimeError, match="rank 1: exited with code 3"):
            link.run(die_on_rank_1, timeout=patient(60))
        with pytest.raises(RuntimeError, match="closed"):
            link.run(pid_and_namespace)
    assert_gone(places)


def assert_gone(ranks: list[tuple[int, str]]) -> None:
    namespaces = {namespace for _, namespace in ranks}
    deadline = time.monotonic() + patient(10)
    while True:
        left = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _in(pid, namespaces)]
        if not left:
            break
        assert time.monotonic() < deadline, f"processes {left} are still in {namespaces}"
        time.sleep(0.05)


def _in(pid: int, namespaces: set[str]) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/ns/net") in namespaces
    except OSError:  # it has ended in the meantime
        return False


@pytest.fixture
def fresh_answer() -> Iterator[None]:
    why_not.cache_clear()
    yield
    why_not.cache_clear()


@pytest.mark.usefixtures("fresh_answer")
def test_says_which_commands_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "tc" else f"/sbin/{tool}")
    assert "needs the commands tc" in (why_not() or "")
    with pytest.raises(RuntimeError, match="iproute2"), SlowLink(1e9):
        pass


SPANS = [
    TimeSpan(0, "computes", "own rows", 5.0, 5.3),
    TimeSpan(0, "receives", "piece 1", 5.1, 5.2),
    TimeSpan(0, "receives", "piece <2>", 5.2, 5.21),
    TimeSpan(1, "computes", "all rows", 5.05, 5.4),
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


@needs_link
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
