"""Default tiles: large where the result fills the GPU, smaller where it does not."""

import subprocess
import sys

import pytest
import torch

from tpkernels.kernels.target import A100, B200, H100, INTERPRETER, MI300
from tpkernels.kernels.tiles import KERNELS, MatmulTile, candidates, default_tile, pushing_tile, row_tile

BF16 = torch.bfloat16


def test_default_tile_is_the_largest_when_the_result_fills_the_gpu():
    for kernel in KERNELS:
        tile = default_tile(kernel, "descriptor", BF16, H100, 8192, 8192)
        assert tile == candidates(kernel, "descriptor", BF16, H100)[0]


def test_default_tile_shrinks_until_every_processor_has_one():
    rows, cols = 2048, 1536  # 96 tiles of 128x256, 192 of 128x128
    tile = default_tile("linear", "descriptor", BF16, H100, rows, cols)
    assert (tile.block_rows, tile.block_cols) == (128, 128)
    assert tile.tiles(rows, cols) >= H100.processors


def test_default_tile_of_a_tiny_result_makes_the_most_tiles():
    tile = default_tile("linear", "pointer", BF16, A100, 1, 512)
    assert tile.tiles(1, 512) == max(t.tiles(1, 512) for t in candidates("linear", "pointer", BF16, A100))


@pytest.mark.parametrize(
    "target", [A100, H100, B200, MI300, INTERPRETER], ids=lambda t: f"{t.backend}{t.capability}"
)
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("ragged", [False, True], ids=["aligned", "ragged"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_case_has_a_tile(kernel, ragged, dtype, target):
    for shape in ((1, 1), (0, 5), (300, 50257), (8192, 8192)):
        assert isinstance(default_tile(kernel, "pointer", dtype, target, *shape, ragged), MatmulTile)


@pytest.mark.parametrize(
    ("chunk_rows", "block_rows"), [(1024, 128), (128, 128), (64, 64), (192, 64), (320, 128), (1, 64)]
)
def test_pushing_tile_computes_few_rows_past_the_end_of_a_chunk(chunk_rows, block_rows):
    tiles = candidates("linear", "descriptor", BF16, H100)
    tile = pushing_tile(tiles[0], tiles, chunk_rows)
    assert (tile.block_rows, tile.flatten) == (block_rows, False)
    strange = MatmulTile(256, 16, 16, num_warps=4, num_stages=1)
    assert pushing_tile(strange, tiles, chunk_rows) == strange


@pytest.mark.parametrize("features", [1, 17, 1024, 12288, 16384])
def test_row_tile_holds_whole_rows(features):
    tile = row_tile("test", features)
    assert features <= tile.block_cols < 2 * max(features, 16)
    assert tile.chunk % tile.block_rows == 0


def test_plain_values_and_oracles_need_no_triton():
    """The way of a machine without a GPU: names, tiles, layouts and torch oracles.

    And of what compiles: Triton decides when a kernel is defined whether it is interpreted.
    """
    kernels = ("activations", "operands", "reference", "target", "tiles", "footprints")
    modules = (*(f"kernels.{module}" for module in kernels), "gate.ahead_of_time")
    program = "; ".join(f"import tpkernels.{module}" for module in modules)
    program += "; import sys; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
