"""The interpreter's faults with bf16 and fp8 are mended here."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tpkernels.kernels.interpret import bf16_from_fp32, fp32_from_bf16, mend

mend()

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU these tests do not interpret")


def test_bf16_from_fp32_rounds_as_torch_does():
    bits = torch.randint(-(2**31), 2**31, (100_000,), dtype=torch.int64).to(torch.int32)
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), 3.4e38, 1e-45, 1 + 1 / 256, 1 + 3 / 256])
    values = torch.cat([bits.view(torch.float32), special])
    numbers = ~values.isnan()
    expected = values.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    ours = bf16_from_fp32(values.numpy())
    np.testing.assert_array_equal(ours[numbers], expected[numbers])
    assert np.isnan(fp32_from_bf16(ours[~numbers])).all()


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 0x7E, E5M2: 0x7B}  # codes
both_formats = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])


@triton.jit
def _cast_kernel(x_ptr, y_ptr, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT)
    tl.store(y_ptr + i, tl.load(x_ptr + i).to(y_ptr.dtype.element_ty))


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """By a kernel, in blocks of which the size is a power of two."""
    padded = torch.cat([x, x.new_zeros(2**16)])[: 2**16]
    y = torch.empty(2**16, dtype=dtype)
    _cast_kernel[(1,)](padded, y, COUNT=2**16)
    return y[: len(x)]


def numbers_of(dtype: torch.dtype) -> torch.Tensor:
    """Those that are not negative, in the order of their codes, from 0."""
    return torch.arange(LARGEST[dtype] + 1, dtype=torch.uint8).view(dtype).float()


@both_formats
def test_cast_rounds_to_the_nearest_and_ties_to_even(dtype):
    numbers = numbers_of(dtype)
    middles = (numbers[1:] + numbers[:-1]) / 2
    codes = torch.arange(len(numbers), dtype=torch.uint8)
    below, above = codes[:-1], codes[1:]
    even = torch.where(below % 2 == 0, below, above)
    under, over = middles.nextafter(middles - 1), middles.nextafter(middles + 1)
    values = torch.cat([numbers, middles, under, over])
    expected = torch.cat([codes, even, below, above])
    assert torch.equal(cast(values, dtype).view(torch.uint8), expected)
    assert torch.equal(cast(-values, dtype).view(torch.uint8), expected | 0x80)
    assert torch.equal(values.to(dtype).view(torch.uint8), expected), "torch's own"


@both_formats
def test_cast_saturates_as_hardware_does(dtype):
    """Where torch's would be NaN or infinity."""
    *_, below, last = numbers_of(dtype).tolist()
    step = last - below
    values = torch.tensor([last + 0.49 * step, last + 0.51 * step, last + step, 3e38, float("inf")])
    assert cast(values, dtype).view(torch.uint8).tolist() == [LARGEST[dtype]] * 5
    assert cast(-values, dtype).view(torch.uint8).tolist() == [0x80 | LARGEST[dtype]] * 5
    assert cast(torch.tensor([float("nan"), -float("nan")]), dtype).view(torch.uint8).tolist() == [0x7F] * 2


@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@both_formats
def test_every_fp8_number_widens_exactly(dtype, wide):
    every = torch.arange(256, dtype=torch.uint8).view(dtype)
    ours, expected = cast(every, wide), every.to(wide)
    torch.testing.assert_close(ours, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(ours.signbit()[~ours.isnan()], expected.signbit()[~ours.isnan()])


def test_every_bf16_number_widens_exactly():
    """Subnormal ones, too, which are what rows are made of that are scaled up before they are rounded."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    assert torch.equal(cast(every, torch.float32).view(torch.int32), every.float().view(torch.int32))


@triton.jit
def _product_kernel(x_ptr, y_ptr, S: tl.constexpr):
    i = tl.arange(0, S)[:, None] * S + tl.arange(0, S)[None, :]
    tl.store(y_ptr + i, tl.dot(tl.load(x_ptr + i), tl.load(x_ptr + i).T, max_num_imprecise_acc=S))


@both_formats
def test_product_takes_subnormal_numbers_as_they_are(dtype):
    x = torch.arange(256, dtype=torch.uint8).view(dtype).view(16, 16)
    x = torch.where(x.float().isfinite(), x.float(), 0.0).to(dtype)
    y = torch.empty(16, 16)
    _product_kernel[(1,)](x, y, S=16)
    torch.testing.assert_close(y.double(), x.double() @ x.double().T, rtol=1e-6, atol=0)
    assert y[0, 0] > 0  # the first row is all subnormal, or nearly so
