"""What is refused as unsound, and what never is."""

import random

import pytest
import torch

from tests.dispatch.conftest import CPU
from tests.products import pairwise
from tpkernels.dispatch.candidates import tune_key
from tpkernels.dispatch.checking import (
    BLOCK,
    ROUNDING,
    TF32_BOUND,
    bound_of,
    mismatch,
    results_of,
    scratch_like,
)
from tpkernels.dispatch.products import PRODUCTS, linear
from tpkernels.dispatch.record import Layer

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
T, N, K = 384, 768, 256  # nine rows of tiles of 128 x 256 on a small scale


def posed(record, layer):
    """Its key, and operands as the autotuner makes them."""
    key = tune_key(record, *record.sample(layer))
    return key, scratch_like(record.sample(layer), key.depth, CPU)


def put(value, *where):
    return lambda y, operands: y.__setitem__(where, value)


def copy(target, source):
    return lambda y, operands: y.__setitem__(target, y[source].clone())


def transpose_a_tile(y, operands):
    y[:128, :128] = y[:128, :128].T.clone()


def leave_a_columns_bias_out(y, operands):
    y[:, 767] -= operands[2][767]


def leave_out_one_step_of_the_depth(y, operands):
    x, w = operands[:2]
    y[:128, :256] -= x[:128, -16:] @ w[:256, -16:].T


FAULTS = {
    "half_a_tile_is_zero": put(0, slice(128, 192), slice(256, 512)),
    "one_tile_is_zero": put(0, slice(-BLOCK, None), slice(-BLOCK, None)),
    "a_stale_tile": copy((slice(128, 256), slice(256, 512)), (slice(128), slice(256))),
    "rows_of_others": copy(slice(64, 80), slice(80, 96)),
    "one_wrong_row": copy(383, 0),
    "one_nan": put(float("nan"), 200, 300),
    "transposed_tile": transpose_a_tile,
    "a_columns_bias_left_out": leave_a_columns_bias_out,
    "one_step_of_the_depth_left_out": leave_out_one_step_of_the_depth,
}


@pairwise(fault=FAULTS, dtype=DTYPES)
def test_a_fault_is_refused(fault, dtype):
    key, operands = posed(linear, Layer(T, N, K, dtype))
    expected = results_of(linear, linear.by_torch, operands)
    broken = (expected[0].clone(), None)
    assert mismatch(broken, expected, key) is None
    fault(broken[0], operands)
    assert mismatch(broken, expected, key).startswith("result 0 is off by ")


def test_a_tile_that_no_norm_sees_is_named_by_its_place():
    key, operands = posed(linear, Layer(4096, 4096, 16, bias=False))
    expected = results_of(linear, linear.by_torch, operands)
    broken = (expected[0].clone(), None)
    broken[0][2048:2064, 1024:1040] = 0
    difference = (broken[0].float() - expected[0].float()).norm() / expected[0].float().norm()
    assert difference < bound_of(key)
    assert "most at rows 2048 to 2063, columns 1024 to 1039: " in mismatch(broken, expected, key)


def test_what_one_block_may_be_off_by_all_together_may_not():
    key, operands = posed(linear, Layer(T, N, K, torch.float32, bias=False))
    (y, _) = results_of(linear, linear.by_torch, operands)
    off = y * (1 + 1.5 * bound_of(key))
    one_block = y.clone()
    one_block[:BLOCK, :BLOCK] = off[:BLOCK, :BLOCK]
    assert mismatch((one_block, None), (y, None), key) is None
    assert mismatch((off, None), (y, None), key)


def test_wrong_shapes_dtypes_and_zeros_are_refused():
    key, operands = posed(linear, Layer(T, N, K))
    (y, none) = results_of(linear, linear.by_torch, operands)
    assert "expected (384, 768)" in mismatch((y[:-1], none), (y, none), key)
    assert "in torch.float32" in mismatch((y.float(), none), (y, none), key)
    assert "is there for one" in mismatch((y, y), (y, none), key)
    key, _ = posed(linear, Layer(T, N, K))
    zeros, tiny = torch.zeros(T, N), torch.zeros(T, N)
    tiny[3, 4] = 1e-10
    assert mismatch((zeros,), (zeros.clone(),), key) is None
    assert mismatch((tiny,), (zeros,), key)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("record", PRODUCTS.values(), ids=PRODUCTS)
def test_honest_candidates_are_never_refused(record, dtype):
    """The exact result, rounded once, in many random shapes, small and ragged ones among them."""
    draw = random.Random(f"{record.name} {dtype}")
    for _ in range(20):
        sizes = [draw.choice([1, 2, 7, draw.randint(1, 40), draw.randint(41, 300)]) for _ in range(3)]
        activation, glu = draw.choice(["none", "gelu_tanh", "silu", "relu"]), draw.choice(["swiglu", "geglu"])
        bias, training = (draw.random() < 0.5 for _ in range(2))
        layer = Layer(*sizes, dtype, activation, glu, bias=bias, training=training)
        key, operands = posed(record, layer)
        expected = results_of(record, record.by_torch, operands)
        wide = tuple(x.double() if isinstance(x, torch.Tensor) else x for x in operands)
        exact = results_of(record, record.by_torch, wide)
        rounded = tuple(None if e is None else x.to(e.dtype) for x, e in zip(exact, expected, strict=True))
        assert mismatch(rounded, expected, key) is None, layer


DEPTHS = [64, 1024, 16384]


@pytest.mark.parametrize("depth", DEPTHS)
def test_fp32_bound_is_a_small_multiple_of_two_honest_sums(depth):
    """One takes its terms in order, as a kernel does, the other from the end."""
    key, (x, w, *_) = posed(linear, Layer(64, 64, depth, torch.float32, bias=False))
    sums = [torch.zeros(64, 64) for _ in range(2)]
    for order, one_by_one in zip((range(depth), reversed(range(depth))), sums, strict=True):
        for k in order:
            one_by_one.addcmul_(x[:, k, None], w[None, :, k])
    apart = float((sums[0] - sums[1]).norm() / sums[0].norm())
    assert 1.5 * apart < bound_of(key) < 5 * apart


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("depth", DEPTHS)
def test_16_bit_bound_is_a_small_multiple_of_two_honest_roundings(depth, dtype):
    """One rounds once, the other also each of eight parts of the sum, and what it has of it."""
    key, (x, w, *_) = posed(linear, Layer(64, 64, depth, dtype, bias=False))
    exact = x.double() @ w.double().T
    once = exact.to(dtype).double()
    assert float((once - exact).norm() / exact.norm()) == pytest.approx(ROUNDING[dtype], rel=0.05)
    parts = torch.zeros(64, 64, dtype=dtype)
    for mine, theirs in zip(x.chunk(8, 1), w.chunk(8, 1), strict=True):
        parts += mine @ theirs.T
    apart = float((parts - once).norm() / exact.norm())
    assert 1.3 * apart < bound_of(key) < 3 * apart


@pytest.mark.parametrize("depth", DEPTHS)
def test_tf32_may_be_rounded_by_one_and_cut_off_by_the_other(depth, monkeypatch):
    x, w = (torch.randn(96, depth) for _ in range(2))

    def cut(a):
        return (a.view(torch.int32) & ~0x1FFF).view(torch.float32)

    def rounded(a):
        return ((a.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)

    ours, torchs = cut(x) @ cut(w).T, rounded(x) @ rounded(w).T
    apart = float((ours - torchs).norm() / torchs.norm())
    assert 1.5 * apart < TF32_BOUND < 5 * apart
