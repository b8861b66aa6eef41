"""From fp8 to wider numbers: the bits of the oracle."""

import pytest
import torch

from tests.kernels.checks import DTYPES, assert_written, normal, rows_for
from tests.products import pairwise
from tpkernels.kernels.dequantize import dequantize
from tpkernels.kernels.scaled import DTYPE_OF, Scaled, dequantize_ref, quantize_ref

WORDS = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
SHAPES = {"one_row": (1, 136), "one_column": (40, 1), "ragged": (37, 301), "aligned": (9, 2052)}


def assert_same(ours, oracles):
    assert ours.dtype == oracles.dtype
    torch.testing.assert_close(ours, oracles, rtol=0, atol=0, equal_nan=True)


@pairwise(shape=SHAPES, scaling=["rows", "blocks"], format=list(DTYPE_OF), dtype=DTYPES)
def test_numbers_are_the_oracles(shape, scaling, format, dtype, device):
    x = normal(*shape, torch.float32, device) * torch.logspace(-3, 3, shape[0], device=device)[:, None]
    x[-1, -1] = float("nan")
    packed = Scaled(quantize_ref(x, format, scaling), shape[1], format, scaling)
    ours = dequantize(packed.data, packed.scale, dtype=WORDS[dtype])
    assert ours.isnan().any()
    assert_same(ours, dequantize_ref(packed.data, packed.scale, dtype))


@pairwise(format=list(DTYPE_OF), dtype=DTYPES)
def test_every_number_of_a_format(format, dtype, device):
    data = torch.arange(256, dtype=torch.uint8, device=device).view(DTYPE_OF[format]).expand(4, 256)
    scale = torch.tensor([[1.0, 3.0], [2.0**-126, 1e30], [0.1, 1e-30], [float("nan"), 1.0]], device=device)
    for data_or_columns in (data, data.contiguous(), data.t().contiguous().t()):
        ours = dequantize(data_or_columns, scale, dtype=WORDS[dtype])
        assert_same(ours, dequantize_ref(data, scale, dtype))


@pytest.mark.parametrize("shape", [(0, 8), (5, 0), (0, 0)], ids=str)
def test_empty_matrices(shape, device):
    data = torch.empty(shape, device=device).to(torch.float8_e4m3fn)
    assert dequantize(data, torch.ones(shape[0], 1, device=device), dtype="bfloat16").shape == shape


def test_numbers_go_where_they_are_wanted_and_nowhere_else(device):
    packed = Scaled(
        quantize_ref(normal(5, 300, torch.float32, device), "e4m3", "blocks"), 300, "e4m3", "blocks"
    )
    oracles = dequantize_ref(packed.data, packed.scale, torch.float32)
    out, around = rows_for([oracles])
    dequantize(packed.data, packed.scale, dtype="float32", out=out[0])
    assert_written(out, around, [oracles])


DATA, SCALE = torch.ones(4, 300).to(torch.float8_e4m3fn), torch.ones(4, 3)
REFUSED = {
    "float64": (lambda: dequantize(DATA, SCALE, dtype="float64"), "bfloat16, float16 or float32 as dtype"),
    "wide data": (lambda: dequantize(SCALE, SCALE, dtype="float32"), "expected data in fp8"),
    "wide scale": (lambda: dequantize(DATA, SCALE.double(), dtype="float32"), "got .* and torch.float64"),
    "3-D": (lambda: dequantize(DATA[None], SCALE, dtype="float32"), "data of 2 dimensions"),
    "scale": (
        lambda: dequantize(DATA, SCALE[:, :2], dtype="float32"),
        r"scale of shape \(4, 1\) or \(4, 3\) .* got \(4, 2\)",
    ),
    "out": (
        lambda: dequantize(DATA, SCALE, dtype="float32", out=torch.empty(4, 300, dtype=torch.float16)),
        "y of out in torch.float32",
    ),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="these tensors are on the CPU")
@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_dequantized_is_refused(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()
