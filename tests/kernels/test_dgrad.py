"""`dgrad` and `dgrad_act` against float64, and the bias gradient that rides along."""

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
from tpkernels.gate.accuracy import BOUND, relative_error
from tpkernels.kernels.activations import ACTIVATIONS
from tpkernels.kernels.dgrad import dgrad, dgrad_act
from tpkernels.kernels.reference import dgrad_act_ref, dgrad_ref


def operands(shape, dtype, device):
    tokens, in_features, out_features = shape
    dy = normal(tokens, out_features, dtype, device)
    w = normal(out_features, in_features, dtype, device) / max(out_features, 1) ** 0.5
    return dy, w, normal(tokens, in_features, dtype, device)


def assert_dgrad_act(dy, w, z, activation, form=None):
    dz, db = dgrad_act(dy, w, z, activation, bias_grad=True, tile=TILE, form=form)
    exact_dz, exact_db = dgrad_act_ref(dy.double(), w.double(), z.double(), activation)
    torch_dz, _ = dgrad_act_ref(*map(dense, (dy, w, z)), activation)
    assert dz.dtype == dy.dtype
    assert_accurate(dz, exact_dz, torch_dz, "dz")
    assert db is not None
    assert db.dtype == torch.float32
    # relative to the magnitudes that are summed: the sum itself may cancel to nearly nothing
    assert (db.double() - exact_db).norm() <= BOUND[torch.float32] * exact_dz.abs().sum(0).norm()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_dgrad_matches_float64(shape, dtype, device):
    dy, w, _ = operands(shape, dtype, device)
    assert_accurate(dgrad(dy, w, tile=TILE), dgrad_ref(dy.double(), w.double()), dgrad_ref(dy, w), "dx")


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_dgrad_act_matches_float64(shape, activation, dtype, device):
    assert_dgrad_act(*operands(shape, dtype, device), activation)


@pytest.mark.parametrize("form", ["descriptor", "pointer"])
def test_dgrad_act_forms_agree_with_float64(form, device):
    assert_dgrad_act(*operands(SHAPES["aligned"], torch.bfloat16, device), "gelu_tanh", form)


@pytest.mark.parametrize("which", [0, 1, 2], ids=["dy", "weight", "z"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_dgrad_act_takes_any_layout(layout, which, device):
    tensors = list(operands(SHAPES["aligned"], torch.float16, device))
    tensors[which] = layout(tensors[which])
    assert_dgrad_act(*tensors, "silu")


@pytest.mark.parametrize("shape", EMPTY_SHAPES.values(), ids=EMPTY_SHAPES.keys())
def test_dgrad_act_takes_empty(shape, device):
    tensors = operands(shape, torch.float32, device)
    ours = dgrad_act(*tensors, "gelu", bias_grad=True, tile=TILE)
    for actual, exact in zip(ours, dgrad_act_ref(*tensors, "gelu"), strict=True):
        torch.testing.assert_close(actual, exact)


def test_dgrad_act_bias_grad_is_the_same_bits_every_time(device):
    tensors = operands((200, 40, 48), torch.bfloat16, device)
    first, second = (dgrad_act(*tensors, "relu2", bias_grad=True, tile=TILE).db for _ in range(2))
    assert first is not None
    assert second is not None
    assert torch.equal(first, second)


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
def test_dgrad_act_bias_grad_ignores_rows_past_the_end(device):
    dy, w, z = operands((33, 40, 48), torch.float32, device)
    dy = dy.abs() + 1
    w[:, 3] = float("inf")  # dy * inf is inf on every token, but 0 * inf, past the last token, is NaN
    db = dgrad_act(dy, w, z, "none", bias_grad=True, tile=TILE).db
    assert db is not None
    assert db[3] == float("inf")


def test_dgrad_rows_do_not_depend_on_the_batch(device):
    dy, w, z = operands((70, 72, 88), torch.bfloat16, device)
    whole = dgrad_act(dy, w, z, "gelu", tile=TILE).dz
    for tokens in (1, 33, 69):
        assert torch.equal(dgrad_act(dy[:tokens], w, z[:tokens], "gelu", tile=TILE).dz, whole[:tokens])


@pytest.mark.parametrize("activation", [a for a in ACTIVATIONS if a != "gelu"])
def test_dgrad_act_with_a_wrong_derivative_is_out_of_bounds(activation, device):
    """The check of accuracy can fail: another activation's derivative is far outside it."""
    dy, w, z = operands(SHAPES["ragged"], torch.float32, device)
    exact, _ = dgrad_act_ref(dy.double(), w.double(), z.double(), "gelu")
    assert relative_error(dgrad_act(dy, w, z, activation, tile=TILE).dz, exact) > 1000 * BOUND[torch.float32]
