"""Names of tiles, and defaults: large where the result fills the GPU, smaller where it does not."""

import re
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from tpkernels.kernels import triton_versions
from tpkernels.kernels.target import A100, B200, H100, INTERPRETER, L40S, MI300
from tpkernels.kernels.tiles import (
    KERNELS,
    MatmulTile,
    candidates,
    chunk_tiles,
    default_tile,
    default_tiles,
    pushing_tile,
    row_tile,
    serves,
    waiting_tile,
    without_spills,
)

BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "128x256x64-w8-s3-p4"),
        ({"flatten": True, "group": 4}, "128x256x64-w8-s3-p4-flat-g4"),
        ({"per_processor": 2, "splits": 4}, "128x256x64-w8-s3-p4-x2-k4"),
        ({"flatten": True, "per_processor": 2, "group": 16}, "128x256x64-w8-s3-p4-flat-x2-g16"),
    ],
)
def test_a_name_is_read_back(changes, name):
    tile = replace(MatmulTile(128, 256, 64, num_warps=8, num_stages=3, parts=4), **changes)
    assert tile.name == name
    assert MatmulTile.named(name) == tile


def test_every_shipped_name_is_read_back_and_tells_tiles_apart():
    for kernel, form, target in product(KERNELS, ("descriptor", "pointer"), (H100, B200, A100)):
        shipped = candidates(kernel, form, BF16, target)
        assert [MatmulTile.named(tile.name) for tile in shipped] == list(shipped)
        assert len({tile.name for tile in shipped}) == len(shipped)


@pytest.mark.parametrize(
    "name",
    [
        *("", "torch", "128x256x64", "128x256x64-w8-s3", "128x256x64-w8-s3-p4 ", "128x256x64-w8-s3-p4-x1"),
        *("128x256x64-w8-s3-p4-g8", "0128x256x64-w8-s3-p4", "100x256x64-w8-s3-p4", "128x256x64-w8-s0-p4"),
        *("128x256x64-w8-s3-p4-flat-flat", "128x256x64-w8-s3-p4-k2-x2", "128x256x64-w8-s3-p4-k0"),
        *("128x256x64-w8-s3-p64", "128x256x64-w8-s3-p4-z3", "\u0661x256x64-w8-s3-p4", "9" * 5000),
        *(f"{'9' * 5000}x256x64-w8-s3-p4", "128x128x64-w4-s5-p4-c1", "128x256x64-w8-s3-p4-ws"),
    ],
)
def test_what_no_tile_is_called_is_refused(name):
    with pytest.raises(ValueError, match=r"expected|Exceeds the limit"):
        MatmulTile.named(name)


def test_what_is_timed_on_hopper_changes_no_default():
    """Which is faster, a GPU says; until then launchers take what they took."""
    assert all(len(candidates(k, "descriptor", BF16, H100)) > len(_defaults(k, H100)) for k in KERNELS)
    for kernel, rows, cols in product(KERNELS, (1, 512, 2048, 8192), (512, 1536, 14336)):
        assert default_tile(kernel, "descriptor", BF16, H100, rows, cols) in _defaults(kernel, H100)


def _defaults(kernel, target):
    return default_tiles(kernel, "descriptor", BF16, target)


def test_a_tile_that_spills_with_an_epilogue_is_not_shipped_with_it():
    large = MatmulTile.named("128x256x64-w8-s3-p4-flat")
    assert large in candidates("dglu", "descriptor", BF16, H100)
    served = [gate for gate in ("swiglu", "geglu_tanh", "geglu") if serves("dglu", large, (gate, "h"))]
    assert served == ["swiglu", "geglu_tanh"]
    assert serves("dgrad", large, ("gelu", "db"))


def test_a_tile_that_spills_is_replaced_from_that_version_of_triton_on(monkeypatch):
    small, large = (MatmulTile(rows, 64, 16, num_warps=4, num_stages=3) for rows in (16, 64))
    for version, pair, alone in (((3, 7), 3, 3), ((3, 8), 2, 3), ((3, 9), 2, 2), ((3, 10), 2, 2)):
        monkeypatch.setattr(triton_versions, "triton_version", lambda version=version: version)
        assert without_spills("dgrad_pairs", small).num_stages == pair
        assert without_spills("dgrad_pairs", large) == large
        assert default_tiles("linear", "pointer", torch.float32, H100)[0].num_stages == alone


def test_what_is_replaced_is_shipped(monkeypatch):
    monkeypatch.setattr(triton_versions, "triton_version", lambda: (3, 7))
    cases = product(KERNELS, ("descriptor", "pointer"), (BF16, torch.float32), (True, False))
    shipped = {
        (kernel, tile.name)
        for kernel, form, dtype, ragged in cases
        for tile in candidates(kernel, form, dtype, H100, ragged)
    }
    shipped |= {("dgrad_pairs", tile) for kernel, tile in shipped if kernel == "dgrad"}
    for replaced in triton_versions.REPLACED_SINCE.values():
        assert replaced.keys() <= shipped
        assert [MatmulTile.named(name).name for name in replaced.values()] == list(replaced.values())


def test_default_tile_is_large_where_it_fills_the_gpu_and_smaller_where_it_does_not():
    for kernel in KERNELS:
        tile = default_tile(kernel, "descriptor", BF16, H100, 8192, 8192)
        assert tile == candidates(kernel, "descriptor", BF16, H100)[0]
    rows, cols = 2048, 1536  # 96 tiles of 128x256, 192 of 128x128
    tile = default_tile("linear", "descriptor", BF16, H100, rows, cols)
    assert (tile.block_rows, tile.block_cols) == (128, 128)
    assert tile.tiles(rows, cols) >= H100.processors
    tile = default_tile("linear", "pointer", BF16, A100, 1, 512)
    assert tile.tiles(1, 512) == max(t.tiles(1, 512) for t in candidates("linear", "pointer", BF16, A100))


def test_every_case_has_a_tile():
    shapes, dtypes = ((1, 1), (0, 5), (300, 50257), (8192, 8192)), (BF16, torch.float16, torch.float32)
    targets = (A100, H100, B200, MI300, INTERPRETER)
    for kernel, dtype, target, shape, ragged in product(KERNELS, dtypes, targets, shapes, (False, True)):
        assert isinstance(default_tile(kernel, "pointer", dtype, target, *shape, ragged), MatmulTile)


@pytest.mark.parametrize("waits", [True, False], ids=["waits", "stores"])
@pytest.mark.parametrize("form", ["descriptor", "pointer"])
@pytest.mark.parametrize("rows", [256, 8192])
def test_tiles_of_chunks_begin_with_the_one_that_is_taken_untold(form, rows, waits):
    """And are tiles that the gate compiles for these kernels, none of which starts loads early."""
    first, *others = chunk_tiles("linear", form, torch.bfloat16, H100, rows, 1792, rows // 8, waits=waits)
    defaults = default_tiles("linear", form, torch.bfloat16, H100)
    usual = default_tile("linear", form, torch.bfloat16, H100, rows, 1792)
    assert first == (
        waiting_tile("linear", usual, rows // 8) if waits else pushing_tile(usual, defaults, rows // 8)
    )
    shapes = [(tile.block_rows, tile.block_cols) for tile in (first, *others)]
    assert sorted(shapes) == sorted((tile.block_rows, tile.block_cols) for tile in defaults)
    assert not any(tile.flatten for tile in others)


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


PAGE = (Path(__file__).parents[2] / "docs/which-kernels.md").read_text()
TABLE = [
    row.strip("| ").split(" | ") for row in PAGE.splitlines() if re.match(r"\| \w+ \| (\w+, )?\w+ \| `", row)
]


@pytest.mark.parametrize(("gpu", "kernels", "defaults", "beside"), TABLE)
def test_page_names_the_tiles_that_are_shipped(gpu, kernels, defaults, beside, monkeypatch):
    monkeypatch.setattr(triton_versions, "triton_version", lambda: (3, 7))
    target = {"H100": H100, "B200": B200, "A100": A100, "L40S": L40S}[gpu]
    form = "descriptor" if target.has_tma else "pointer"
    dtype = torch.float8_e4m3fn if "fp8" in kernels else BF16
    for kernel in kernels.removesuffix(", fp8").split(", "):
        names = [f"`{tile.name}`" for tile in candidates(kernel, form, dtype, target)]
        assert names == [*defaults.split(", "), *(beside.split(", ") if beside != "none" else [])]


def test_plain_values_and_oracles_need_no_triton():
    """The way of a machine without a GPU: names, tiles, layouts and torch oracles.

    And of what compiles: Triton decides when a kernel is defined whether it is interpreted.
    """
    kernels = ("activations", "operands", "reference", "target", "tiles", "matmul_tile")
    modules = (*(f"kernels.{module}" for module in kernels), "gate.ahead_of_time")
    program = "; ".join(f"import tpkernels.{module}" for module in modules)
    program += "; import sys; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
