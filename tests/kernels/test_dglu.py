"""`dglu` against float64: both gradients and the gated product that is emitted again."""

import pytest
import torch

from tests.kernels.checks import DTYPES, EMPTY_SHAPES, LAYOUTS, SHAPES, TILE, assert_accurate, dense, normal
from tpkernels.kernels.activations import GATE_OF
from tpkernels.kernels.dglu import dglu
from tpkernels.kernels.reference import dglu_ref


def operands(shape, dtype, device):
    tokens, in_features, out_features = shape
    dy = normal(tokens, out_features, dtype, device)
    w = normal(out_features, in_features, dtype, device) / max(out_features, 1) ** 0.5
    return dy, w, *(normal(tokens, in_features, dtype, device) for _ in range(2))


def assert_dglu(dy, w, g, u, kind="swiglu", form=None):
    ours = dglu(dy, w, g, u, kind=kind, emit_h=True, tile=TILE, form=form)
    exact = dglu_ref(dy.double(), w.double(), g.double(), u.double(), kind)
    torchs = dglu_ref(*map(dense, (dy, w, g, u)), kind)
    for name, *triple in zip(("dg", "du", "h"), ours, exact, torchs, strict=True):
        assert_accurate(*triple, name)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("kind", GATE_OF)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_dglu_matches_float64(shape, kind, dtype, device):
    assert_dglu(*operands(shape, dtype, device), kind)


@pytest.mark.parametrize("form", ["descriptor", "pointer"])
def test_dglu_forms_agree_with_float64(form, device):
    assert_dglu(*operands(SHAPES["aligned"], torch.bfloat16, device), "swiglu", form)


@pytest.mark.parametrize("which", [0, 1, 2, 3], ids=["dy", "weight", "g", "u"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_dglu_takes_any_layout(layout, which, device):
    tensors = list(operands(SHAPES["aligned"], torch.float16, device))
    tensors[which] = layout(tensors[which])
    assert_dglu(*tensors)


@pytest.mark.parametrize("shape", EMPTY_SHAPES.values(), ids=EMPTY_SHAPES.keys())
def test_dglu_takes_empty(shape, device):
    tensors = operands(shape, torch.float32, device)
    for ours, exact in zip(dglu(*tensors, emit_h=True, tile=TILE), dglu_ref(*tensors), strict=True):
        torch.testing.assert_close(ours, exact)


def test_dglu_emits_h_only_if_asked(device):
    assert dglu(*operands(SHAPES["one_tile"], torch.float32, device), tile=TILE).h is None
