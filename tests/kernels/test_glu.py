"""`glu_fwd` against float64: both pre-activations and the gated product."""

import pytest
import torch

from tests.kernels.checks import DTYPES, EMPTY_SHAPES, LAYOUTS, SHAPES, TILE, assert_accurate, dense, normal
from tpkernels.kernels.activations import GATE_OF
from tpkernels.kernels.glu import glu_fwd
from tpkernels.kernels.reference import glu_ref


def operands(shape, dtype, device):
    tokens, in_features, out_features = shape
    x = normal(tokens, in_features, dtype, device)
    weights = (
        normal(out_features, in_features, dtype, device) / max(in_features, 1) ** 0.5 for _ in range(2)
    )
    return x, *weights


def assert_glu(x, w_gate, w_up, kind="swiglu", form=None):
    ours = glu_fwd(x, w_gate, w_up, kind=kind, keep_gu=True, tile=TILE, form=form)
    exact = glu_ref(x.double(), w_gate.double(), w_up.double(), kind)
    torchs = glu_ref(*map(dense, (x, w_gate, w_up)), kind)
    for name, *triple in zip("hgu", ours, exact, torchs, strict=True):
        assert_accurate(*triple, name)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("kind", GATE_OF)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_glu_fwd_matches_float64(shape, kind, dtype, device):
    assert_glu(*operands(shape, dtype, device), kind)


@pytest.mark.parametrize("form", ["descriptor", "pointer"])
def test_glu_fwd_forms_agree_with_float64(form, device):
    assert_glu(*operands(SHAPES["aligned"], torch.bfloat16, device), "swiglu", form)


@pytest.mark.parametrize("which", [0, 1, 2], ids=["x", "w_gate", "w_up"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_glu_fwd_takes_any_layout(layout, which, device):
    tensors = list(operands(SHAPES["aligned"], torch.float16, device))
    tensors[which] = layout(tensors[which])
    assert_glu(*tensors)


@pytest.mark.parametrize("shape", EMPTY_SHAPES.values(), ids=EMPTY_SHAPES.keys())
def test_glu_fwd_takes_empty(shape, device):
    tensors = operands(shape, torch.float32, device)
    for ours, exact in zip(glu_fwd(*tensors, keep_gu=True, tile=TILE), glu_ref(*tensors), strict=True):
        torch.testing.assert_close(ours, exact)


def test_glu_fwd_keeps_nothing_unasked(device):
    out = glu_fwd(*operands(SHAPES["one_tile"], torch.float32, device), tile=TILE)
    assert out.g is None
    assert out.u is None


def test_glu_fwd_rows_do_not_depend_on_the_batch(device):
    x, w_gate, w_up = operands((70, 72, 88), torch.bfloat16, device)
    whole = glu_fwd(x, w_gate, w_up, tile=TILE).h
    for tokens in (1, 33, 69):
        assert torch.equal(glu_fwd(x[:tokens], w_gate, w_up, tile=TILE).h, whole[:tokens])
