"""The interpreter's faults with bf16 and fp8 are mended here; those with fp8 exist upstream."""

from dataclasses import replace
from importlib.util import find_spec, module_from_spec

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.runtime import interpreter

from tpkernels.kernels.interpret import (
    INTERPRETING,
    bf16_from_fp32,
    fp8_from_fp32,
    fp32_from_bf16,
    fp32_from_fp8,
    mend,
)

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


def test_this_process_interprets():
    assert INTERPRETING


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
def test_cast_goes_to_the_nearest_number_and_from_the_middle_to_the_even_one(dtype):
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


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@both_formats
def test_cast_of_every_16_bit_number_is_torchs(dtype, source):
    every = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(source)
    ours, expected = (cast(every, dtype).view(torch.uint8), every.to(dtype).view(torch.uint8))
    held = every.float().abs() <= torch.finfo(dtype).max  # the next test has the others
    assert torch.equal(ours[held], expected[held])
    assert set(ours[every.isnan()].tolist()) == {0x7F}


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


def test_upstream_interpreter_is_wrong_about_fp8():
    """If this fails, upstream has mended its casts, and `interpret.mend` can shrink."""
    one = np.array([1.984], dtype=np.float32)
    bits = interpreter._convert_float(one, tl.float32, tl.float8e4nv, ir.ROUNDING_MODE.RTNE)
    assert bits.view(np.uint8).item() == 0x38  # 1, where 2 is next
    assert fp8_from_fp32(one, E4M3).item() == 0x40
    nan = np.array([0x7F], dtype=np.uint8)
    assert interpreter._convert_float(nan, tl.float8e4nv, tl.float32, None).view(np.float32) == 480
    assert np.isnan(fp32_from_fp8(nan, E4M3))
    least = np.array([1], dtype=np.uint8)  # what a product makes of it
    assert interpreter._convert_float(least, tl.float8e5, tl.float16, None).view(np.float16) == 0
    assert fp32_from_fp8(least, E5M2) == 2.0**-16


class Noting:
    """What would be replaced while a kernel runs."""

    def __init__(self):
        self.names = []

    def set_attr(self, home, name, value):
        self.names.append((home, name))


@pytest.fixture(scope="module")
def upstream():
    """The interpreter as it comes."""
    module = module_from_spec(find_spec("triton.runtime.interpreter"))
    module.__spec__.loader.exec_module(module)
    return module


def test_numpy_holds_types_as_upstream_has_it(upstream):
    assert interpreter._get_np_dtype is not upstream._get_np_dtype
    scalars = [value for value in vars(tl).values() if isinstance(value, tl.dtype) and value is not tl.void]
    known = 0
    for scalar in scalars:
        for kind in (scalar, tl.block_type(scalar, [4, 2]), tl.pointer_type(scalar)):
            try:
                expected = upstream._get_np_dtype(kind)
            except KeyError:  # int128, say
                continue
            assert interpreter._get_np_dtype(kind) == expected, kind
            known += 1
    assert interpreter._get_np_dtype(tl.block_type(tl.pointer_type(tl.float32), [4])) == np.uint64
    assert known > 30


def test_builtins_that_upstream_replaces_are_replaced(upstream):
    assert interpreter._patch_builtin is not upstream._patch_builtin
    for home in (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base):
        theirs, ours = Noting(), Noting()
        upstream._patch_builtin(home, interpreter.interpreter_builder, theirs)
        interpreter._patch_builtin(home, interpreter.interpreter_builder, ours)
        assert ours.names == theirs.names
    assert len(ours.names) > 2


@triton.jit
def _double_kernel(x_ptr):
    x = tl.load(x_ptr)
    tl.store(x_ptr, x + x)


@pytest.mark.parametrize("debug", [False, True])
def test_an_overflow_is_told_where_upstream_says_it(debug, monkeypatch):
    """Which looks in any case; its `debug` is no option of a launch."""
    options = replace(interpreter.interpreter_builder.options, debug=debug)
    monkeypatch.setattr(interpreter.interpreter_builder, "options", options)
    x = torch.tensor([2**30], dtype=torch.int32)
    if debug:
        with pytest.raises(Exception, match="int32 overflow detected for operation add"):
            _double_kernel[(1,)](x)
    else:
        _double_kernel[(1,)](x)
        assert x.item() == -(2**31)
