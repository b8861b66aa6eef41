"""`linear_fwd` against float64, at sizes that straddle tile edges and in every layout a user may bring."""

import pytest
import torch

from tests.kernels.checks import (
    DTYPES,
    EMPTY_SHAPES,
    LAYOUTS,
    SHAPES,
    TILE,
    assert_accurate,
    normal,
)
from tpkernels.kernels.activations import ACTIVATIONS, Activation
from tpkernels.kernels.linear import linear_fwd
from tpkernels.kernels.operands import Form
from tpkernels.kernels.reference import linear_ref
from tpkernels.kernels.tiles import MatmulTile


def operands(
    shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, ...]:
    tokens, in_features, out_features = shape
    x = normal(tokens, in_features, dtype, device)
    w = normal(out_features, in_features, dtype, device) / max(in_features, 1) ** 0.5
    return x, w, normal(1, out_features, dtype, device)[0]


def assert_linear(
    x: torch.Tensor,
    w: torch.Tensor,
    b: torch.Tensor | None,
    activation: Activation = "none",
    form: Form | None = None,
    tile: MatmulTile = TILE,
) -> None:
    y, z = linear_fwd(x, w, b, activation=activation, keep_z=True, tile=tile, form=form)
    exact_y, exact_z = linear_ref(x.double(), w.double(), None if b is None else b.double(), activation)
    # of copies: some processors' products of bf16 read, and add 0 times, what lies past a row of odd width
    torch_y, torch_z = linear_ref(x.contiguous(), w.contiguous(), b, activation)
    assert z is not None
    assert y.dtype == z.dtype == x.dtype
    assert_accurate(z, exact_z, torch_z, "z")
    assert_accurate(y, exact_y, torch_y, "y")


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_linear_fwd_matches_float64(shape, activation, dtype, device):
    assert_linear(*operands(shape, dtype, device), activation)


@pytest.mark.parametrize("form", ["descriptor", "pointer"])
@pytest.mark.parametrize("bias", [False, True], ids=["nobias", "bias"])
@pytest.mark.parametrize("parts", [1, 2])
def test_linear_fwd_forms_agree_with_float64(form, bias, parts, device):
    x, w, b = operands(SHAPES["aligned"], torch.bfloat16, device)
    tile = MatmulTile(32, 32, 32, num_warps=4, num_stages=1, parts=parts, flatten=True)
    assert_linear(x, w, b if bias else None, "gelu_tanh", form, tile)


@pytest.mark.parametrize("shape", EMPTY_SHAPES.values(), ids=EMPTY_SHAPES.keys())
def test_linear_fwd_takes_empty(shape, device):
    x, w, b = operands(shape, torch.float32, device)
    y, z = linear_fwd(x, w, b, activation="relu", keep_z=True, tile=TILE)
    exact_y, exact_z = linear_ref(x, w, b, "relu")
    torch.testing.assert_close(y, exact_y)
    torch.testing.assert_close(z, exact_z)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("which", ["x", "weight", "bias"])
def test_linear_fwd_takes_any_layout(layout, which, device):
    x, w, b = operands(SHAPES["aligned"], torch.float16, device)
    if which == "x":
        x = layout(x)
    elif which == "weight":
        w = layout(w)
    else:
        b = layout(b[None].expand(2, -1).contiguous())[1]
    assert_linear(x, w, b, "silu")


def test_linear_fwd_leaves_its_inputs_alone(device):
    given_tensors = operands(SHAPES["ragged"], torch.float32, device)
    copies = [t.clone() for t in given_tensors]
    linear_fwd(*given_tensors, activation="gelu", tile=TILE)
    assert all(torch.equal(a, b) for a, b in zip(given_tensors, copies, strict=True))


def test_linear_fwd_without_activation_keeps_y_as_z(device):
    x, w, b = operands(SHAPES["ragged"], torch.float32, device)
    kept, dropped = linear_fwd(x, w, b, keep_z=True, tile=TILE), linear_fwd(x, w, b, tile=TILE)
    assert kept.z is kept.y
    assert dropped.z is None


@pytest.mark.parametrize("form", ["descriptor", "pointer"])
def test_linear_fwd_rows_do_not_depend_on_the_batch(form, device):
    x, w, b = operands((70, 72, 88), torch.bfloat16, device)
    whole = linear_fwd(x, w, b, activation="gelu", tile=TILE, form=form).y
    for tokens in (1, 31, 32, 33, 69):
        assert torch.equal(
            linear_fwd(x[:tokens], w, b, activation="gelu", tile=TILE, form=form).y, whole[:tokens]
        )
