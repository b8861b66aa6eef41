"""Linear layers in fp8 against the same in 16 bits, and against torch's row-wise product of fp8.

All operands are quantized within what is timed, weights too: a step of one microbatch does so.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.case import Case, Work
from bench.shapes import Shape
from tpkernels import Recipe, ops

PASSES = ("forward", "forward_backward")
OFF_BY = 0.1  # of the 16-bit result: each operand keeps three bits behind the point


def case_of(shape: Shape, pass_: str, dtype: torch.dtype, device: str) -> Case:
    t, n, k = shape.tokens, shape.out_features, shape.in_features
    x = torch.randn(t, k, device=device).to(dtype)
    w = (torch.randn(n, k, device=device) / k**0.5).to(dtype)
    dy = torch.randn(t, n, device=device).to(dtype)
    ways: dict[str, Callable[[], Tensor]] = {
        "ours": lambda: ops.linear(x, w, quantize=Recipe.rowwise()),
        "blockwise": lambda: ops.linear(x, w, quantize=Recipe.blockwise()),
        "naive": lambda: F.linear(x, w),
    }
    if pass_ == "forward":
        if x.is_cuda:
            ways["scaled_mm"] = lambda: _by_torch(x, w)
        timed = {name: _listed(way) for name, way in ways.items()}
    else:
        leaves = x.requires_grad_(), w.requires_grad_()
        timed = {name: _gradients(way, leaves, dy) for name, way in ways.items()}
    products = 1 if pass_ == "forward" else 3
    work = Work(
        op="linear_fp8",
        shape=str(shape),
        pass_=pass_,
        naive="F.linear in 16 bits",
        dtype=dtype,
        device=device,
        flops=products * shape.flops,
        bytes=products * x.element_size() * (t * k + n * k + t * n),
    )
    return Case(work, timed, tolerance=OFF_BY)


def _listed(way: Callable[[], Tensor]) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (way(),)


def _gradients(
    way: Callable[[], Tensor], leaves: tuple[Tensor, ...], dy: Tensor
) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: torch.autograd.grad(way(), leaves, dy)


def _by_torch(x: Tensor, w: Tensor) -> Tensor:
    """Torch's fast product, as ours is forward, of operands that eager torch quantizes."""
    (x_data, x_scale), (w_data, w_scale) = _quantized(x), _quantized(w)
    return torch._scaled_mm(x_data, w_data.t(), x_scale, w_scale.t(), out_dtype=x.dtype, use_fast_accum=True)


def _quantized(matrix: Tensor) -> tuple[Tensor, Tensor]:
    scale = matrix.abs().amax(1, keepdim=True).float() / 448.0
    return (matrix / scale).to(torch.float8_e4m3fn), scale
