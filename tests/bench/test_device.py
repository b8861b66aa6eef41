"""Devices of `make gpu`: the GPU's calls of torch, and a CPU that stands in."""

from __future__ import annotations

from unittest.mock import MagicMock, create_autospec

import pytest
import torch

from bench.device import Cuda, StandIn, milliseconds

NAMES = ("Stream", "CUDAGraph", "graph", "current_stream", "get_device_properties", "stream", "synchronize")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> dict[str, MagicMock]:
    """Functions of torch.cuda that do nothing, and take what torch's take."""
    mocks = {name: create_autospec(getattr(torch.cuda, name)) for name in NAMES}
    for name, mock in mocks.items():
        monkeypatch.setattr(torch.cuda, name, mock)
    return mocks


def test_streams_wait_for_each_other_on_a_gpu(cuda):
    device = Cuda()
    device.fork()
    device.beside()
    device.join()
    side, current = cuda["Stream"].return_value, cuda["current_stream"].return_value
    side.wait_stream.assert_called_once_with(current)
    current.wait_stream.assert_called_once_with(side)
    cuda["stream"].assert_called_once_with(side)
    device.synchronize()
    assert cuda["synchronize"].call_count == 1


def test_a_way_is_captured_once_and_replayed_on_a_gpu(cuda):
    calls: list[int] = []
    replay = Cuda().capture(lambda: calls.append(1))
    assert calls == [1]
    replay()
    assert cuda["CUDAGraph"].return_value.replay.call_count == 1
    assert calls == [1]


def test_a_gpu_tells_its_name_and_sizes(cuda):
    facts = Cuda().facts()
    assert {"gpu", "capability", "sms", "memory", "torch", "triton", "python", "cuda"} == facts.keys()


def test_a_cpu_that_stands_in_takes_as_long_as_its_calls():
    device, calls = StandIn(), list[int]()
    assert milliseconds(device, lambda: calls.append(1)) > 0
    assert len(calls) > 1
    assert device.facts()["gpu"].startswith("none: ")
