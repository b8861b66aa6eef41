"""What a call over symmetric memory enqueues in which stream, by streams that write a log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.loopback import CountingKernels, VirtualHandle, open_symmetric_loopback, start
from tpkernels.comm.side_stream import SideStream, StreamOrder
from tpkernels.comm.transports import symmetric
from tpkernels.comm.transports.memory import Layout
from tpkernels.comm.transports.symmetric import SymmetricExchange


class Stream:
    """Stands for a stream of a GPU: what is enqueued, by name."""

    def __init__(self, name: str, log: list[tuple[str, ...]], device: Device) -> None:
        self.name, self._log, self._device = name, log, device
        self.captures = False

    def wait_stream(self, other: Stream) -> None:
        self._log.append((self.name, "waits for", other.name))

    def wait_event(self, event: str) -> None:
        self._log.append((self.name, "waits for", event))

    def record_event(self) -> str:
        return f"an event of {self.name}"

    def __enter__(self) -> None:
        self._device.entered.append(self._device.current)
        self._device.current = self

    def __exit__(self, *_: object) -> None:
        self._device.current = self._device.entered.pop()


class Device:
    """Stands for a GPU that has streams, for one rank."""

    def __init__(self) -> None:
        self.log: list[tuple[str, ...]] = []
        self.entered: list[Stream] = []
        self.side, self.main, self.other = (
            Stream(name, self.log, self) for name in ("side", "main", "other")
        )
        self.current = self.main

    def streams(self) -> SideStream:
        stream = SideStream(torch.device("cpu"))
        stream._stream = self.side  # type: ignore[assignment]
        return stream


@pytest.fixture
def device(monkeypatch) -> Iterator[Device]:
    device = Device()
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: device.current)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: device.current.captures)
    return device


@pytest.fixture
def end(device, monkeypatch) -> SymmetricExchange:
    """One rank of two, whose device logs what is enqueued."""

    def logged(what: str, inner: Any = None) -> Any:
        def log(self: Any, *arguments: Any, **options: Any) -> Any:
            device.log.append((device.current.name, what))
            return inner(self, *arguments, **options) if inner else None

        return log

    (end, _) = open_symmetric_loopback("it", Layout(3, (4, 3), torch.float32))[:2]
    end.side, end.streams = device.streams(), StreamOrder(torch.device("cuda"))
    monkeypatch.setattr(VirtualHandle, "barrier", logged("barrier"))
    monkeypatch.setattr(
        VirtualHandle, "stream_write_value32", logged("word", VirtualHandle.stream_write_value32)
    )
    monkeypatch.setattr(symmetric.SymmetricDelivery, "_put", logged("rows", symmetric.SymmetricDelivery._put))
    return end


def test_a_gather_enqueues_one_copy_and_one_word_a_peer_behind_one_event(device, end):
    delivery = start(end, [torch.zeros(4, 3)] * 3)
    delivery.before_kernels_wait()
    delivery.end()
    assert device.log == [
        ("main", "word"),  # which call kernels wait for
        ("side", "waits for", "main"),
        ("side", "rows"), ("side", "word"), ("side", "rows"), ("side", "word"),
        ("main", "rows"), ("main", "word"),
        ("main", "waits for", "side"),
    ]  # fmt: skip


def test_a_gather_of_8_ranks_takes_8_copies_9_words_and_2_waits_of_streams(device, end):
    (wide,) = open_symmetric_loopback("it", Layout(8, (4, 3), torch.float32))[:1]
    wide.side, wide.streams = end.side, end.streams
    plan = wide.plan_gather(32, 8, 0, 48, True)
    device.log.clear()
    delivery = wide.begin(None, plan, 3, torch.zeros(4, 3))
    for round in plan.rounds:
        delivery.move(round.swaps, torch.zeros(4, 3), 0)
    delivery.keep(torch.zeros(4, 3))
    delivery.before_kernels_wait()
    delivery.end()
    found = Counter(what for _, what, *_ in device.log)
    assert found == {"rows": 8, "word": 9, "waits for": 2}


def test_a_kernel_that_waits_comes_behind_the_barrier_of_its_call_and_not_behind_the_pushes(device, end):
    for _ in range(2):
        start(end, [torch.zeros(4, 3)] * 3)
    end.released(1)
    end.released(2)
    device.log.clear()
    third = start(end, [torch.zeros(4, 3)] * 3)
    assert device.log[:3] == [("main", "word"), ("side", "waits for", "main"), ("side", "barrier")]
    device.log.clear()
    third.before_kernels_wait()
    assert device.log == [("main", "waits for", "an event of side")]


def test_streams_that_push_are_joined_at_the_end_of_a_call_as_captures_want(device, end):
    delivery = start(end, [torch.zeros(4, 3)] * 3)
    order = []
    release, wait = delivery.release, delivery.wait
    delivery.release = lambda: (order.append("release"), release())  # type: ignore[method-assign, assignment]
    delivery.wait = lambda: (order.append("wait"), wait())  # type: ignore[method-assign, assignment]
    delivery.end()
    assert order == ["release", "wait"]
    assert device.log[-1] == ("main", "waits for", "side")


def test_calls_in_two_streams_take_effect_one_after_the_other(device, end):
    start(end, [torch.zeros(4, 3)] * 3).end()
    device.log.clear()
    device.current = device.other
    start(end, [torch.zeros(4, 3)] * 3).end()
    assert device.log[:3] == [
        ("other", "waits for", "main"),
        ("other", "word"),
        ("side", "waits for", "other"),
    ]
    device.log.clear()
    start(end, [torch.zeros(4, 3)] * 3).end()
    assert ("other", "waits for", "main") not in device.log


def test_rows_read_in_another_stream_are_read_before_the_call_after(device, end):
    delivery = start(end, [torch.zeros(4, 3)] * 3)
    device.current = device.other
    delivery.before_kernels_wait()
    delivery.end()
    device.current = device.main
    device.log.clear()
    start(end, [torch.zeros(4, 3)] * 3)
    assert device.log[0] == ("main", "waits for", "other")


def test_a_captured_call_waits_for_no_stream_outside_of_the_graph(device, end):
    end.flag_kernels = CountingKernels()
    start(end, [torch.zeros(4, 3)] * 3).end()
    device.log.clear()
    device.current = device.other
    device.other.captures = True
    start(end, [torch.zeros(4, 3)] * 3).end()
    assert ("other", "waits for", "main") not in device.log
    device.log.clear()
    device.current = device.side
    device.side.captures = True
    end.streams.current()
    assert device.log == [("side", "waits for", "other")]  # of one graph
