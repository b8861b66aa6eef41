"""Tensors are read out of another process's memory, whatever their strides: here out of one's own."""

import ctypes
import os
import random
from unittest.mock import patch

import pytest
import torch

from tpkernels.checkpoints import peer_memory
from tpkernels.checkpoints.peer_memory import Located, can_read, own_trial, read

TENSORS = (
    torch.randint(256, (64, 48), dtype=torch.uint8),
    torch.randn(12, 5, 8),
    torch.randn(3000, 2).to(torch.bfloat16),
    torch.tensor(3.0, dtype=torch.float64),
)


def view_of(tensor, draw):
    """Any dimensions narrowed, then any order of them."""
    view = tensor
    for dim, size in enumerate(tensor.shape):
        first = draw.randint(0, size)
        view = view.narrow(dim, first, draw.randint(0, size - first) if size > 8 else size - first)
    return view.permute(draw.sample(range(tensor.ndim), tensor.ndim))


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda tensor: str(tensor.dtype))
def test_any_view_is_read_into_any_other(tensor):
    draw = random.Random(20261126)
    for number in range(20):
        source = view_of(tensor, draw)
        wider = torch.zeros([2 * size for size in source.shape], dtype=source.dtype)
        target = torch.zeros_like(source) if number % 2 else wider[tuple(map(slice, source.shape))]
        read(os.getpid(), Located.of(source).runs(), Located.of(target).runs())
        assert torch.equal(target, source)
        assert wider.count_nonzero() <= source.count_nonzero()


def test_memory_is_read_whatever_the_default_device_is():
    source, target = torch.arange(6.0).view(2, 3)[:, :2], torch.zeros(2, 2)
    with torch.device("meta"):
        assert can_read(own_trial())
        read(os.getpid(), Located.of(source).runs(), Located.of(target).runs())
    assert torch.equal(target, source)


def test_calls_that_end_early_go_on_where_they_ended():
    """As the system's do at 2 GiB, or at 1024 runs of a side; what lies in one piece is one run."""
    source, target = torch.arange(640.0).view(64, 10), torch.zeros(64, 20)[:, :10]
    calls = []

    def ends_early(process, *vectors):
        (here, runs, there, pieces), flags = vectors[:4], vectors[4]
        calls.append((runs, pieces))
        size = (ctypes.c_ulong * 2).from_address(there)
        whole, size[1] = size[1], min(size[1], 500)
        found = system_call(process, here, runs, there, pieces, flags)
        size[1] = whole
        return found

    system_call = peer_memory._call()
    with patch.multiple(peer_memory, _MOST_RUNS=32, _call=lambda: ends_early):
        read(os.getpid(), Located.of(source).runs(), Located.of(target).runs())
    assert torch.equal(target, source)
    assert calls == [(32, 1), (32, 1), (32, 1), (27, 1), (14, 1), (2, 1)]


def test_a_part_is_where_its_indices_are():
    tensor = torch.arange(24).view(4, 6).t()
    part = Located.of(tensor).part((1, 2), (3, 2))
    assert part == Located.of(tensor[1:4, 2:4])


def test_a_process_is_read_only_if_it_has_the_bytes_that_it_tells():
    trial = own_trial()
    assert can_read(trial)
    assert not can_read(trial._replace(content=bytes(32)))
    assert not can_read(trial._replace(address=8))
    assert not can_read(trial._replace(process=2**22 + 1))  # more than there are


def test_what_cannot_be_read_is_an_error():
    located = Located.of(torch.zeros(4))._replace(address=8)
    with pytest.raises(
        ConnectionError, match=f"the memory of process {os.getpid()} cannot be read: Bad addr"
    ):
        read(os.getpid(), located.runs(), Located.of(torch.zeros(4)).runs())
