"""Waves, tiles and the clock of products."""

import pytest
import torch

from tests.products import once
from tpkernels.gpus import gpu_named
from tpkernels.kernels.target import H100
from tpkernels.kernels.tiles import default_tile
from tpkernels.planning.timeline.kernel_times import TILES, Cycles, TiledTimes, _tile_for

ROUND = Cycles(step=1000.0, edge=4000.0, start=0.0)
TIMES = TiledTimes(
    gpu_named("h100"), lambda kernel, tile, asking: ROUND, boost=1e9, power_clock=1e9, launch=0.0
)


def test_a_product_takes_its_waves_or_what_memory_takes():
    # 132 processors; at 1 GHz a tile of 128 x 256 takes 4 + 64 µs at a depth of 4096.
    assert TIMES.product("linear", 128 * 132, 256, 4096) == pytest.approx(68e-6)
    assert TIMES.product("linear", 128 * 132 + 1, 256, 4096) == pytest.approx(2 * 68e-6)
    assert TIMES.product("linear", 0, 256, 4096) == 0
    traffic = 2 * (2**20 * 16 + 16 * 256 + 2**20 * 256)
    assert TIMES.product("linear", 2**20, 256, 16) >= traffic / 3.35e12
    assert TIMES.streamed(3.35e12 * 0.9) == pytest.approx(1.0)
    twice = TiledTimes(gpu_named("h100"), lambda *_: Cycles(2000.0, 8000.0, 0.0), boost=1e9, power_clock=1e9)
    ratio = twice.product("linear", 8192, 4096, 4096) / TIMES.product("linear", 8192, 4096, 4096)
    assert ratio == pytest.approx(2, rel=0.02)


def test_the_clock_falls_as_tensor_cores_are_busy():
    times = TiledTimes(gpu_named("h100"))
    assert times.clock(1.0) == times.power_clock < times.clock(0.5) < times.clock(0.0) == times.boost


@once(rows=[64, 512, 2048, 8192], cols=[256, 1792, 4096])
def test_tiles_are_those_that_a_launcher_takes(rows, cols):
    tile = default_tile("linear", "descriptor", torch.bfloat16, H100, rows, cols)
    found = _tile_for(rows, cols, H100.processors)
    assert (found.rows, found.cols, found.depth) == (tile.block_rows, tile.block_cols, tile.block_depth)
    assert found in TILES
