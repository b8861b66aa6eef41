"""Weight gradients that are added to others, or split by tokens; see test_product_launchers, too."""

from dataclasses import replace

import pytest
import torch

from tests.kernels.checks import DTYPES, EMPTY_SHAPES, LAYOUTS, SHAPES, TILE, assert_accurate, normal
from tests.products import once, pairwise
from tpkernels.gate.numerics import Frames
from tpkernels.kernels import launch
from tpkernels.kernels.dgrad import dgrad
from tpkernels.kernels.linear import linear_fwd
from tpkernels.kernels.reference import wgrad_accumulate_ref_, wgrad_ref
from tpkernels.kernels.target import H100
from tpkernels.kernels.tiles import MatmulTile, candidates, default_tile
from tpkernels.kernels.wgrad import wgrad, wgrad_accumulate_


def operands(shape, dtype, device):
    tokens, in_features, out_features = shape
    return normal(tokens, out_features, dtype, device), normal(tokens, in_features, dtype, device)


def framed_grad(shape, dtype, device, frames: Frames):
    """A main_grad with something in it already, among canaries."""
    _, in_features, out_features = shape
    main_grad = frames.empty((out_features, in_features), dtype, device)
    return main_grad.copy_(normal(out_features, in_features, dtype, device))


def assert_accumulates(main_grad, dy, x, form=None, splits=1):
    exact = main_grad.double()
    wgrad_accumulate_ref_(exact, dy.double(), x.double())
    wgrad_accumulate_(main_grad, dy, x, tile=in_parts(splits), form=form)
    assert_accurate(main_grad, exact, what="main_grad")


def in_parts(splits):
    return replace(TILE, splits=splits)


@pytest.mark.parametrize("form", ["descriptor", "pointer"])
def test_wgrad_writes_fp32_of_16_bit_operands(form, device):
    dy, x = operands(SHAPES["aligned"], torch.bfloat16, device)
    dw = wgrad(dy, x, dtype=torch.float32, tile=TILE, form=form)
    assert dw.dtype == torch.float32
    assert_accurate(dw, wgrad_ref(dy.double(), x.double()))


@pairwise(shape=SHAPES, dtype=DTYPES, grad_dtype=DTYPES)
def test_wgrad_accumulate_matches_float64(shape, dtype, grad_dtype, device, frames):
    assert_accumulates(framed_grad(shape, grad_dtype, device, frames), *operands(shape, dtype, device))


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "expanded"])
def test_wgrad_accumulate_takes_a_main_grad_of_any_layout(layout, splits, device):
    dy, x = operands(SHAPES["aligned"], torch.float16, device)
    main_grad = LAYOUTS[layout](normal(dy.shape[1], x.shape[1], torch.float32, device))
    assert_accumulates(main_grad, dy, x, splits=splits)


SPLIT = {"one_tile": 2, "ragged": 2, "aligned": 5}  # of 1, 3 and 3 steps of 32 tokens


@once(shape=list(SPLIT), dtype=[torch.float32, torch.bfloat16])
def test_split_wgrad_adds_sums_of_every_nth_step_in_order(shape, dtype, device):
    (dy, x), splits = operands(SHAPES[shape], dtype, device), SPLIT[shape]
    step_of = torch.arange(len(x), device=device) // TILE.block_depth
    exact = torch.zeros(dy.shape[1], x.shape[1], device=device)
    for split in range(splits):
        mine = step_of % splits == split
        exact += wgrad(dy[mine], x[mine], dtype=torch.float32, tile=TILE)
    assert torch.equal(wgrad(dy, x, dtype=torch.float32, tile=in_parts(splits)), exact)
    assert torch.equal(wgrad(dy, x, tile=in_parts(splits), form="pointer"), exact.to(dtype))


@once(shape=[SHAPES["ragged"], SHAPES["aligned"]], grad_dtype=DTYPES)
def test_split_wgrad_is_added_in_fp32_and_rounded_once(shape, grad_dtype, device, frames):
    dy, x = operands(shape, torch.bfloat16, device)
    main_grad = framed_grad(shape, grad_dtype, device, frames)
    once = (wgrad(dy, x, dtype=torch.float32, tile=in_parts(2)) + main_grad.float()).to(grad_dtype)
    wgrad_accumulate_(main_grad, dy, x, tile=in_parts(2))
    assert torch.equal(main_grad, once)


@pytest.mark.needs("descriptors")
def test_split_wgrad_by_descriptors_takes_ragged_columns(device):
    """x and main_grad lie in rows of 16-byte units, and so do the slots."""
    dy, x = (normal(70, cols, torch.bfloat16, device) for cols in (40, 48))
    main_grad = torch.zeros(40, 48, device=device)
    wgrad_accumulate_(main_grad[:, :45], dy, x[:, :45], tile=in_parts(2), form="descriptor")
    assert_accurate(main_grad[:, :45], dy.double().T @ x[:, :45].double())
    assert not main_grad[:, 45:].any()


@once(token=[0, 40, 70], value=[float("nan"), float("inf")])
def test_split_wgrad_hides_no_number_that_is_none(token, value, device):
    dy, x = (normal(71, 40, torch.float32, device).abs() for _ in range(2))
    dy[token, 3] = value
    dw = wgrad(dy, x, tile=in_parts(3))
    assert dw[3].isnan().all() if value != value else dw[3].isinf().all()
    assert dw[[0, 1, 2, *range(4, 40)]].isfinite().all()


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("shape", EMPTY_SHAPES.values(), ids=EMPTY_SHAPES.keys())
def test_wgrad_of_nothing_is_zero_and_changes_nothing(shape, splits, device):
    dy, x = operands(shape, torch.bfloat16, device)
    assert torch.equal(wgrad(dy, x, tile=in_parts(splits)), wgrad_ref(dy, x))
    main_grad = normal(dy.shape[1], x.shape[1], torch.bfloat16, device)
    before = main_grad.clone()
    wgrad_accumulate_(main_grad, dy, x, tile=in_parts(splits))
    assert torch.equal(main_grad, before)


def test_split_wgrad_launches_a_program_for_each_part():
    dy, x = (torch.empty(8192, cols, dtype=torch.bfloat16, device="meta") for cols in (512, 1024))
    tile = MatmulTile(128, 256, 64, num_warps=8, num_stages=4, parts=4, flatten=True)
    with launch.recording(H100) as launches:
        for splits in (1, 4, 16):
            wgrad(dy, x, tile=replace(tile, splits=splits))
    names = [one.kernel.__name__ for one in launches]
    assert names == ["_wgrad_kernel", *["_wgrad_kernel", "_add_slots_kernel"] * 2]
    assert [one.grid for one in launches if one.kernel.__name__ == names[0]] == [(16,), (64,), (132,)]
    slots = launches[1].arguments[2]
    assert (slots.base.dtype, slots.base.shape) == (torch.float32, (4 * 512, 1024))


def test_no_launcher_splits_unless_told_to():
    assert {tile.splits for tile in candidates("wgrad", "descriptor", torch.bfloat16, H100)} == {1, 2, 4}
    for rows, cols in ((16, 64), (512, 1024), (4096, 512), (1792, 4096), (8192, 8192)):
        assert default_tile("wgrad", "descriptor", torch.bfloat16, H100, rows, cols).splits == 1


@pytest.mark.parametrize("start", [linear_fwd, dgrad], ids=["linear_fwd", "dgrad"])
def test_other_products_refuse_a_tile_that_splits(start, device):
    x, weight = normal(32, 32, torch.float32, device), normal(32, 32, torch.float32, device)
    with pytest.raises(ValueError, match="expected a tile with splits=1, got 2"):
        start(x, weight, tile=in_parts(2))
