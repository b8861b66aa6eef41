"""`wgrad` and `wgrad_accumulate_` against float64, for every dtype of the accumulator."""

import pytest
import torch

from tests.kernels.checks import (
    DTYPES,
    EMPTY_SHAPES,
    LAYOUTS,
    SHAPES,
    TILE,
    assert_accurate,
    dense,
    normal,
)
from tpkernels.gate.accuracy import BOUND, Frames, relative_error
from tpkernels.kernels.reference import wgrad_accumulate_ref_, wgrad_ref
from tpkernels.kernels.wgrad import wgrad, wgrad_accumulate_


def operands(shape, dtype, device):
    tokens, in_features, out_features = shape
    return normal(tokens, out_features, dtype, device), normal(tokens, in_features, dtype, device)


def framed_grad(shape, dtype, device, frames: Frames):
    """A main_grad with something in it already, among canaries."""
    _, in_features, out_features = shape
    main_grad = frames.empty((out_features, in_features), dtype, device)
    return main_grad.copy_(normal(out_features, in_features, dtype, device))


def assert_accumulates(main_grad, dy, x, form=None):
    exact = main_grad.double()
    wgrad_accumulate_ref_(exact, dy.double(), x.double())
    wgrad_accumulate_(main_grad, dy, x, tile=TILE, form=form)
    assert_accurate(main_grad, exact, what="main_grad")


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_wgrad_matches_float64(shape, dtype, device):
    dy, x = operands(shape, dtype, device)
    torchs = wgrad_ref(dense(dy), dense(x))
    assert_accurate(wgrad(dy, x, tile=TILE), wgrad_ref(dy.double(), x.double()), torchs, "dw")


@pytest.mark.parametrize("form", ["descriptor", "pointer"])
def test_wgrad_writes_fp32_of_16_bit_operands(form, device):
    dy, x = operands(SHAPES["aligned"], torch.bfloat16, device)
    dw = wgrad(dy, x, dtype=torch.float32, tile=TILE, form=form)
    assert dw.dtype == torch.float32
    assert_accurate(dw, wgrad_ref(dy.double(), x.double()))


@pytest.mark.parametrize("grad_dtype", DTYPES.values(), ids=[f"grad_{name}" for name in DTYPES])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_wgrad_accumulate_matches_float64(shape, dtype, grad_dtype, device, frames):
    assert_accumulates(framed_grad(shape, grad_dtype, device, frames), *operands(shape, dtype, device))


@pytest.mark.parametrize("grad_dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("form", ["descriptor", "pointer"])
def test_wgrad_accumulate_forms_agree_with_float64(form, grad_dtype, device, frames):
    shape = SHAPES["aligned"]
    main_grad = framed_grad(shape, grad_dtype, device, frames)
    assert_accumulates(main_grad, *operands(shape, torch.bfloat16, device), form)


def test_wgrad_accumulate_over_several_backwards_rounds_as_one(device, frames):
    shape = SHAPES["aligned"]
    dy, x = operands(shape, torch.bfloat16, device)
    main_grad = framed_grad(shape, torch.float32, device, frames)
    exact = main_grad.double() + dy.double().T @ x.double()
    for tokens in (slice(0, 24), slice(24, 56), slice(56, None)):
        wgrad_accumulate_(main_grad, dy[tokens], x[tokens], tile=TILE)
    assert_accurate(main_grad, exact)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("which", ["dy", "x"])
def test_wgrad_takes_any_layout(layout, which, device):
    dy, x = operands(SHAPES["aligned"], torch.float16, device)
    dy, x = (layout(dy), x) if which == "dy" else (dy, layout(x))
    assert_accurate(wgrad(dy, x, tile=TILE), wgrad_ref(dy.double(), x.double()))


@pytest.mark.parametrize("layout", [n for n in LAYOUTS if n != "expanded"])
def test_wgrad_accumulate_takes_a_main_grad_of_any_layout(layout, device):
    dy, x = operands(SHAPES["aligned"], torch.float16, device)
    main_grad = LAYOUTS[layout](normal(dy.shape[1], x.shape[1], torch.float32, device))
    assert_accumulates(main_grad, dy, x)


@pytest.mark.parametrize("shape", EMPTY_SHAPES.values(), ids=EMPTY_SHAPES.keys())
def test_wgrad_takes_empty(shape, device):
    dy, x = operands(shape, torch.float32, device)
    torch.testing.assert_close(wgrad(dy, x, tile=TILE), wgrad_ref(dy, x))


def test_wgrad_accumulate_of_no_tokens_changes_nothing(device, frames):
    main_grad = framed_grad((0, 8, 16), torch.float32, device, frames)
    before = main_grad.clone()
    wgrad_accumulate_(main_grad, *operands((0, 8, 16), torch.bfloat16, device), tile=TILE)
    assert torch.equal(main_grad, before)


def test_wgrad_accumulate_twice_is_out_of_bounds(device, frames):
    """The check of accuracy can fail: a gradient that is added twice is far outside it."""
    shape = SHAPES["ragged"]
    dy, x = operands(shape, torch.bfloat16, device)
    main_grad = framed_grad(shape, torch.float32, device, frames)
    exact = main_grad.double() + dy.double().T @ x.double()
    for _ in range(2):
        wgrad_accumulate_(main_grad, dy, x, tile=TILE)
    assert relative_error(main_grad, exact) > 100 * BOUND[torch.float32]
