"""Waves, tiles and the clock of products."""

from unittest.mock import patch

import pytest

from bench.streams import times
from bench.streams.times import Cycles, KernelTimes
from tpkernels.planning.gpus import gpu_named

TIMES = KernelTimes(gpu_named("h100"), boost=1e9, power_clock=1e9, launch=0.0)


ROUND = Cycles(step=1000.0, edge=4000.0, start=0.0)


def product(*sizes, cycles=ROUND):
    with patch.object(times, "usual_cycles", lambda tile, asking: cycles):
        return TIMES.product(*sizes)


def test_a_product_takes_its_waves_or_what_memory_takes():
    # 132 processors; at 1 GHz a tile of 128 x 256 takes 4 + 64 µs at a depth of 4096.
    assert product(128 * 132, 256, 4096) == pytest.approx(68e-6)
    assert product(128 * 132 + 1, 256, 4096) == pytest.approx(2 * 68e-6)
    assert product(0, 256, 4096) == 0
    traffic = 2 * (2**20 * 16 + 16 * 256 + 2**20 * 256)
    assert product(2**20, 256, 16) >= traffic / 3.35e12
    assert TIMES.streamed(3.35e12 * 0.9) == pytest.approx(1.0)
    twice = product(8192, 4096, 4096, cycles=Cycles(2000.0, 8000.0, 0.0))
    assert twice == pytest.approx(2 * product(8192, 4096, 4096), rel=0.02)


def test_the_clock_falls_as_tensor_cores_are_busy():
    times = KernelTimes(gpu_named("h100"))
    assert times.clock(1.0) == times.power_clock < times.clock(0.5) < times.clock(0.0) == times.boost
