"""Activations on the device against float64, value and slope, far into their tails."""

import pytest
import torch
import triton
import triton.language as tl

from tpkernels.kernels.activations import ACTIVATIONS, act_grad_ref, act_ref
from tpkernels.kernels.epilogues import act, act_and_grad
from tpkernels.kernels.target import A100, INTERPRETER, MI300, fast_math


@triton.jit
def _act_kernel(z_ptr, f_ptr, f_again_ptr, slope_ptr, ACTIVATION: tl.constexpr, FAST: tl.constexpr):
    i = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    z = tl.load(z_ptr + i)
    tl.store(f_ptr + i, act(z, ACTIVATION, FAST))
    f_again, slope = act_and_grad(z, ACTIVATION, FAST)
    tl.store(f_again_ptr + i, f_again)
    tl.store(slope_ptr + i, slope)


def on_device(activation, device, fast=False):
    z = torch.linspace(-12, 12, 8192, device=device)
    f, f_again, slope = (torch.full_like(z, float("nan")) for _ in range(3))
    _act_kernel[(8,)](z, f, f_again, slope, ACTIVATION=activation, FAST=fast)
    assert torch.equal(f, f_again)
    return z.double(), f, slope


def exact_slope(z, activation):
    return act_grad_ref(torch.ones_like(z), z, activation)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_act_matches_float64(activation, device):
    z, f, slope = on_device(activation, device)
    torch.testing.assert_close(f.double(), act_ref(z, activation), rtol=3e-6, atol=5e-7)
    torch.testing.assert_close(slope.double(), exact_slope(z, activation), rtol=3e-6, atol=5e-7)


@pytest.mark.parametrize("activation", ["gelu_tanh", "silu"])
def test_act_keeps_its_left_tail(activation, device):
    """1 + tanh would be exactly zero here."""
    z, f, _ = on_device(activation, device)
    tail = (z > -8) & (z < -4) if activation == "silu" else (z > -6) & (z < -4)
    torch.testing.assert_close(f.double()[tail], act_ref(z, activation)[tail], rtol=1e-4, atol=0)


def test_fast_gelu_is_good_to_16_bits(device):
    z, f, slope = on_device("gelu", device, fast=True)
    torch.testing.assert_close(f.double(), act_ref(z, "gelu"), rtol=0, atol=2e-6)
    torch.testing.assert_close(slope.double(), exact_slope(z, "gelu"), rtol=0, atol=2e-6)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_act_oracle_slope_matches_autograd(activation):
    z = torch.linspace(-5, 5, 101, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(act_ref(z, activation).sum(), z)
    torch.testing.assert_close(exact_slope(z.detach(), activation), slope)


@pytest.mark.parametrize("activation", ["relu", "relu2"])
def test_act_keeps_nan(activation, device):
    z = torch.full((8192,), float("nan"), device=device)
    f, f_again, slope = (torch.zeros_like(z) for _ in range(3))
    _act_kernel[(8,)](z, f, f_again, slope, ACTIVATION=activation, FAST=False)
    assert f.isnan().all()
    assert f_again.isnan().all()


def test_fast_math_is_for_16_bit_results_on_cuda_alone():
    assert fast_math(torch.bfloat16, A100)
    assert fast_math(torch.float16, A100)
    assert not fast_math(torch.float32, A100)
    assert not fast_math(torch.bfloat16, MI300)
    assert not fast_math(torch.bfloat16, INTERPRETER)
