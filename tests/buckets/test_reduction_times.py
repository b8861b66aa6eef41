"""Reductions are timed in turn, in place, by the lower quartile: with a clock instead of CUDA's events."""

from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tpkernels.buckets import reduction_times
from tpkernels.buckets.reduction_times import ROUNDS, WARM_UPS, milliseconds

pytestmark = pytest.mark.way("auto")


class _Clock:
    """Each reduction takes what the test says."""

    def __init__(self, durations):
        self.now, self.durations, self.reduced = 0.0, durations, []

    def event(self, enable_timing):
        assert enable_timing
        return _Event(self)

    def reduce(self, group, flat, reduction):
        if not torch.equal(flat, torch.zeros_like(flat)):
            raise AssertionError("a tensor of zeros was to be reduced")
        self.reduced.append(flat.dtype)
        self.now += self.durations[flat.dtype][self.reduced.count(flat.dtype) - 1]
        _reduce(group, flat, reduction)


class _Event:
    def __init__(self, clock):
        self.clock = clock

    def record(self):
        self.at = self.clock.now

    def elapsed_time(self, end):
        return end.at - self.at


_reduce = reduction_times.reduce


def time_two(reduction):
    not_counted = [0.5] * WARM_UPS
    durations = {
        torch.float32: [*not_counted, 9.0, 1.0, 50.0, 2.0, 3.0, 70.0, 80.0, 90.0],
        torch.float64: [*not_counted, *[5.0] * ROUNDS],
    }
    clock = _Clock(durations)
    flats = [torch.zeros(64), torch.zeros(64, dtype=torch.float64)]
    with (
        patch.object(torch.cuda, "Event", clock.event),
        patch.object(torch.cuda, "device", lambda device: nullcontext()),
        patch.object(torch.cuda, "synchronize", lambda: None),
        patch.object(reduction_times, "reduce", clock.reduce),
    ):
        found = milliseconds(dist.group.WORLD, flats, reduction)
    assert clock.reduced == [torch.float32, torch.float64] * (WARM_UPS + ROUNDS)  # in turn
    return found, [flat.any().item() for flat in flats]


@pytest.mark.parametrize("reduction", ["all_reduce", "reduce_scatter"])
def test_the_lower_quartile_of_rounds_without_the_first(ranks2, reduction):
    assert ranks2.run(time_two, reduction) == [([3.0, 5.0], [False, False])] * 2


def reduce_in_place(reduction):
    flat = torch.arange(4.0) * (dist.get_rank() + 1)
    _reduce(dist.group.WORLD, flat, reduction)
    return flat.tolist()


def test_buckets_are_reduced_in_place(ranks2):
    assert ranks2.run(reduce_in_place, "all_reduce") == [[0.0, 3.0, 6.0, 9.0]] * 2
    first, second = ranks2.run(reduce_in_place, "reduce_scatter")
    assert (first[:2], second[2:]) == ([0.0, 3.0], [6.0, 9.0])
