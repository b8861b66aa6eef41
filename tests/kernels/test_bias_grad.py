"""`bias_grad`: sums over rows, in fp32 and in a fixed order."""

import pytest
import torch

from tests.kernels.checks import DTYPES, LAYOUTS, assert_accurate, normal
from tests.products import pairwise
from tpkernels.kernels.bias_grad import bias_grad
from tpkernels.kernels.reference import bias_grad_ref
from tpkernels.kernels.tiles import BlockTile

SUM_TILE = BlockTile(chunk=16, block_rows=8, block_cols=32, num_warps=4)
# more rows than chunk * chunk, so that the partial sums take two levels
ROWS_AND_COLS = {"one_chunk": (16, 32), "ragged": (45, 37), "one_row": (1, 5), "two_levels": (300, 7)}


@pairwise(shape=ROWS_AND_COLS, dtype=DTYPES)
def test_bias_grad_matches_float64(shape, dtype, device):
    dy = normal(*shape, dtype, device) + 1  # else the sums cancel
    db = bias_grad(dy, tile=SUM_TILE)
    assert db.dtype == torch.float32
    assert_accurate(db, bias_grad_ref(dy.double()))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_bias_grad_takes_any_layout(layout, device):
    dy = layout(normal(45, 40, torch.bfloat16, device) + 1)
    assert_accurate(bias_grad(dy), bias_grad_ref(dy.double()))


@pytest.mark.parametrize("shape", [(0, 7), (7, 0)], ids=["no_rows", "no_cols"])
def test_bias_grad_takes_empty(shape, device):
    assert torch.equal(bias_grad(torch.empty(shape, device=device)), torch.zeros(shape[1], device=device))
