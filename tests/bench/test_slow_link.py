"""The slow link: as slow as asked for, and gone without a trace; time lines of calls over it."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from bench.slow_link import SlowLink, throttle, why_not
from tests import ranks
from tests.patience import patient
from tests.programs import until

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
    """The shortest of some: a busy machine may be slower than the link, which is never faster than set."""
    link.set_rate(4e7)
    slow = min(max(link.run(seconds_to_reduce)) for _ in range(2))
    link.set_rate(2e8)
    fast = min(max(link.run(seconds_to_reduce)) for _ in range(10))
    assert slow > 3 * fast
    slow, *fast = link.run(seconds_at, 4e7, *[2e8] * 10)[0]
    assert slow > 3 * min(fast)


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
    until(lambda: not any(_in(pid, namespaces) for pid in filter(str.isdigit, os.listdir("/proc"))))


def _in(pid: str, namespaces: set[str]) -> bool:
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
