"""What of a table the clock is told: a product in tiles and steps, or blocks."""

from __future__ import annotations

import pytest
import torch

from tests.gate.user_kernels.test_config import product
from tpkernels.gate.clock.workload import Product
from tpkernels.gate.user_kernels import workload
from tpkernels.gate.user_kernels.table import own_kernel
from tpkernels.gate.user_kernels.workload import OwnWorkload

ARGUMENTS = ("a", "c", "M", "N", "K")


@pytest.fixture
def launched(monkeypatch):
    """What would be launched, instead of it."""
    monkeypatch.setattr(workload, "launch_of", lambda built, values, *rest: (values, *rest))


def test_a_product_is_launched_in_tiles_and_steps_and_a_persistent_grid_asks_for_processors(launched):
    of = OwnWorkload(product(), ARGUMENTS).workload()
    assert of.product == Product(128, 128, 64, itemsize=2)
    assert of.shape == (1000, 2048, 512)
    assert of.tiles == 8 * 16
    assert of.traffic == 2 * (1000 * 512 + 1000 * 2048)
    assert not of.persistent
    (a, c, *numbers), grid = of.on_one(None, 3, 4)
    assert numbers == [128, 384, 256]
    assert (list(a.shape), list(a.strides), a.block_shape) == ([128, 256], [256, 1], [128, 64])
    assert (c.shape, c.dtype, c.device.type) == ((128, 384), torch.bfloat16, "meta")
    assert grid == (3,)
    own = product(grid=["min(cdiv(M, BLOCK) * cdiv(N, BLOCK), processors)"])
    of = OwnWorkload(own, ARGUMENTS).workload()
    assert of.persistent
    assert of.on_one(None, 6, 4)[1] == (1,)


def test_kernel_without_tiles_is_launched_in_blocks(launched):
    table = {
        "kernel": "kernels:row_kernel",
        "signature": {"x": "*fp32", "scale": "fp32"},
        "sizes": {"rows": 4096, "columns": 512},
        "shapes": {"x": ["rows", "columns"]},
        "strides": {"x": ["columns + 8", 1]},
        "values": {"scale": 2},
        "grid": ["rows"],
    }
    of = OwnWorkload(own_kernel("row", table), ("x", "scale")).workload()
    assert (of.product, of.shape, of.tiles) == (None, (0, 0, 0), 4096)
    (x, scale), grid, blocks = of.on_one(None, 10, 0)
    assert (x.shape, x.stride(), scale, grid, blocks) == ((4096, 512), (520, 1), 2.0, (4096,), 10)


def test_same_table_is_the_same_launch_in_every_process():
    assert OwnWorkload(product(), ARGUMENTS).text() == OwnWorkload(product(), ARGUMENTS).text()
    assert OwnWorkload(product(), ARGUMENTS).text() != OwnWorkload(product(num_warps=8), ARGUMENTS).text()
