"""Activations as device helpers: f and f' of `activations`, for the epilogues of the matmul kernels.

All work on fp32 blocks. FAST takes cheaper forms, whose error (5e-4 relative for tanh, 2e-7 absolute for Φ)
drowns in the rounding of a 16-bit result. It holds PTX, so it is for CUDA only: launchers ask
`target.fast_math`. The tanh form of GELU is computed as z s(v), which is 0.5 z (1 + tanh(v / 2)) without its
cancellation in the left tail.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tpkernels.kernels.interpret import mend

mend()


@triton.jit
def sigmoid(x, FAST: tl.constexpr):
    if FAST:
        half_tanh = 0.5 * tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [0.5 * x], dtype=tl.float32, is_pure=True, pack=1
        )
        return 0.5 + half_tanh
    else:
        return tl.sigmoid(x)


@triton.jit
def _normal_cdf(z, FAST: tl.constexpr):
    """Φ(z)."""
    if FAST:
        # Abramowitz and Stegun 7.1.26; libdevice's erf makes a 128x256 epilogue spill
        x = 0.7071067811865476 * tl.abs(z)
        t = 1.0 / (1.0 + 0.3275911 * x)
        series = t * (
            0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429)))
        )
        tail = 0.5 * series * tl.exp(-x * x)
        return tl.where(z < 0, tail, 1.0 - tail)
    else:
        return 0.5 * (1.0 + tl.math.erf(0.7071067811865476 * z))


@triton.jit
def _gelu_tanh_argument(z):
    return z * (1.5957691216057308 + 0.07135481627260025 * z * z)


@triton.jit
def act(z, ACTIVATION: tl.constexpr, FAST: tl.constexpr):
    """f(z), in fp32."""
    if ACTIVATION == "none":
        return z
    elif ACTIVATION == "gelu":
        return z * _normal_cdf(z, FAST)
    elif ACTIVATION == "gelu_tanh":
        return z * sigmoid(_gelu_tanh_argument(z), FAST)
    elif ACTIVATION == "silu":
        return z * sigmoid(z, FAST)
    elif ACTIVATION == "relu":
        return _relu(z)
    else:
        tl.static_assert(ACTIVATION == "relu2", "unknown activation")
        return _relu(z) * _relu(z)


@triton.jit
def act_and_grad(z, ACTIVATION: tl.constexpr, FAST: tl.constexpr):
    """(f(z), f'(z)), in fp32; what the two share is computed once, and what is not used costs nothing."""
    if ACTIVATION == "none":
        return z, tl.full(z.shape, 1.0, tl.float32)
    elif ACTIVATION == "gelu":
        cdf = _normal_cdf(z, FAST)
        return z * cdf, cdf + z * 0.3989422804014327 * tl.exp(-0.5 * z * z)
    elif ACTIVATION == "gelu_tanh":
        s = sigmoid(_gelu_tanh_argument(z), FAST)
        slope = 1.5957691216057308 + 0.21406444881780074 * z * z
        return z * s, s + z * s * (1.0 - s) * slope
    elif ACTIVATION == "silu":
        s = sigmoid(z, FAST)
        return z * s, s + z * s * (1.0 - s)
    elif ACTIVATION == "relu":
        return _relu(z), tl.where(z > 0, 1.0, 0.0)
    else:
        tl.static_assert(ACTIVATION == "relu2", "unknown activation")
        return _relu(z) * _relu(z), 2.0 * _relu(z)


@triton.jit
def _relu(z):
    return tl.where(z < 0, 0.0, z)  # not maximum(), which may drop a NaN


@triton.jit
def halves(scale):
    """`scaled.halves_of`."""
    exponent = ((scale.to(tl.int32, bitcast=True) >> 23) + 127) >> 1  # of the root, biased
    root = (exponent << 23).to(tl.float32, bitcast=True)
    return scale * ((254 - exponent) << 23).to(tl.float32, bitcast=True), root
