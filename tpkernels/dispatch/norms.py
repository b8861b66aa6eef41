"""RMSNorm and LayerNorm, as primitives and their records.

T tokens, K features; mean and rstd are (T,), in fp32 or wider.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tpkernels.dispatch.primitives import primitive
from tpkernels.dispatch.products import sums_dtype
from tpkernels.dispatch.record import Layer, Primitive, launcher
from tpkernels.kernels.operands import DTYPES
from tpkernels.kernels.reference import bias_grad_ref
from tpkernels.kernels.tiles import MAX_FEATURES, MAX_PLUS_FEATURES
from tpkernels.tp_invariance import segments_of_op

# torch's fused kernel takes its sums over tokens one by one: at 8192 they are off by 1.8e-6, at 256 by
# 3e-7, which is what we allow, at 128 by 2e-7, and a pairwise sum by 1.5e-7
FEW_TOKENS = 256
BLOCK_TOKENS = 128
MANY_FEATURES = 512  # from here on calls for so few tokens are quicker than more passes
WIDE = (torch.float32, torch.float64)
_SUMS = (False, True, True)  # of weight and bias, without dx
_layer_norm_backward = torch.ops.aten.native_layer_norm_backward.default


def _takes(x: Tensor, *_: Any) -> bool:
    """Our kernels read a row once; they were not timed against others yet."""
    return x.dtype in DTYPES and 0 < x.shape[1] <= MAX_FEATURES


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """y = x * rstd * weight -> (y, rstd): the bits of `rms_norm_ref`, with less new memory."""
    s = x if x.dtype in WIDE else x.to(torch.float32)
    rstd = s.square().mean(1).add_(eps).rsqrt_()
    y = s.mul(rstd[:, None]).mul_(weight)
    return y if s is x else y.to(x.dtype), rstd


rms_norm = primitive(
    Primitive(
        "rms_norm(Tensor x, Tensor weight, float eps) -> y, rstd",
        _rms_norm,
        launcher("norm", "rms_norm_fwd", "eps", gives=("y", "rstd")),
        lambda layer: (layer.x(), layer.tensor(layer.in_features), 1e-5),
        _takes,
    )
)


def _statistic(layer: Layer) -> Tensor:
    return layer.tensor(layer.tokens, dtype=sums_dtype(layer.dtype))


def _rms_norm_grad(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, plus: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The gradients of x, to which `plus` is added, and in fp32 of weight -> (dx, dw).

    As `rms_norm_bwd_ref`, with less new memory.
    """
    s, wide_dy = (t if t.dtype in WIDE else t.to(torch.float32) for t in (x, dy))
    n = s * rstd[:, None]
    terms = n * wide_dy
    dw = terms.sum(0)
    mean = terms.mul_(weight).mean(1, keepdim=True)
    dx = torch.mul(wide_dy, weight, out=terms).addcmul_(n, mean, value=-1).mul_(rstd[:, None])
    return _plus(dx if s is x else dx.to(x.dtype), plus), dw


def _plus(dx: Tensor, plus: Tensor | None) -> Tensor:
    """dx + plus, in the memory of dx."""
    return dx if plus is None else dx.add_(plus)


def _adding_wide_rows(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The launcher; to rows for whose `plus` it has no registers, that is added in a pass of its own."""

    def launch(*operands: Any, **tile: Any) -> Any:
        *given, plus = operands
        if plus is None or plus.shape[1] <= MAX_PLUS_FEATURES:
            return kernel(*operands, **tile)
        dx, *sums = kernel(*given, None, **tile)
        return _plus(dx, plus), *sums

    return launch


rms_norm_grad = primitive(
    Primitive(
        "rms_norm_grad(Tensor dy, Tensor x, Tensor weight, Tensor rstd, Tensor? plus) -> dx, dweight",
        _rms_norm_grad,
        _adding_wide_rows(launcher("norm", "rms_norm_bwd", gives=("dx", "dweight"))),
        lambda layer: (layer.x(), layer.x(), layer.tensor(layer.in_features), _statistic(layer), layer.x()),
        _takes,
    )
)


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """y = (x - mean) * rstd * weight + bias -> (y, mean, rstd)."""
    dtype, wide = x.dtype, sums_dtype(x.dtype)
    if dtype is not wide:
        # torch's fused kernel in fp32 or wider: given narrower x, it would keep mean and rstd narrow too
        x = x.to(wide)
    if weight.dtype is not wide:
        weight = weight.to(wide)
    if bias is not None and bias.dtype is not wide:
        bias = bias.to(wide)
    y, mean, rstd = torch.native_layer_norm(x, weight.shape, weight, bias, eps)
    return y if dtype is wide else y.to(dtype), mean.view(-1), rstd.view(-1)


def _layer_norm_sample(layer: Layer) -> tuple[Any, ...]:
    bias = layer.tensor(layer.in_features) if layer.bias else None
    return layer.x(), layer.tensor(layer.in_features), bias, 1e-5


layer_norm = primitive(
    Primitive(
        "layer_norm(Tensor x, Tensor weight, Tensor? bias, float eps) -> y, mean, rstd",
        _layer_norm,
        launcher("norm", "layer_norm_fwd", "eps", gives=("y", "mean", "rstd")),
        _layer_norm_sample,
        _takes,
    )
)


def _layer_norm_grad(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, plus: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, to which `plus` is added, and in fp32 of weight and bias -> (dx, dw, db)."""
    dtype, wide = x.dtype, sums_dtype(x.dtype)
    if dtype is not wide or dy.dtype is not wide:
        dy, x = dy.to(wide), x.to(wide)
    if weight.dtype is not wide:
        weight = weight.to(wide)
    # with TP-invariance never fused: those sums also depend on the number of threads
    tokens, fused = x.shape[0], not segments_of_op()
    whole = fused and tokens <= FEW_TOKENS
    if not whole and fused and x.shape[1] >= MANY_FEATURES:
        dw, db = _sums_by_block(dy, x, weight, mean, rstd)
    elif not whole:  # before dx, which takes the memory that this leaves
        dw = (x - mean[:, None]).mul_(rstd[:, None]).mul_(dy).sum(0)
        db = bias_grad_ref(dy)
    dx, *sums = _layer_norm_backward(dy, x, weight.shape, mean, rstd, weight, weight, (True, whole, whole))
    if whole:
        dw, db = sums
    return _plus(dx if dtype is wide else dx.to(dtype), plus), dw, db


def _sums_by_block(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of weight and bias: fused sums over few tokens each, which are added pairwise."""
    dws, dbs = [], []
    for rows in zip(*(each.split(BLOCK_TOKENS) for each in (dy, x, mean, rstd)), strict=True):
        _, dw, db = _layer_norm_backward(*rows[:2], weight.shape, *rows[2:], weight, weight, _SUMS)
        dws.append(dw)
        dbs.append(db)
    return torch.stack(dws).sum(0), torch.stack(dbs).sum(0)


def _layer_norm_grad_fake(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, plus: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    dw = x.new_empty(x.shape[1], dtype=sums_dtype(x.dtype))
    return x.new_empty(x.shape), dw, torch.empty_like(dw)


def _layer_norm_grad_sample(layer: Layer) -> tuple[Any, ...]:
    statistics = _statistic(layer), _statistic(layer)
    return layer.x(), layer.x(), layer.tensor(layer.in_features), *statistics, layer.x()


layer_norm_grad = primitive(
    Primitive(
        "layer_norm_grad(Tensor dy, Tensor x, Tensor weight, Tensor mean, Tensor rstd, Tensor? plus) "
        "-> dx, dweight, dbias",
        _layer_norm_grad,
        _adding_wide_rows(launcher("norm", "layer_norm_bwd")),
        _layer_norm_grad_sample,
        _takes,
        fake=_layer_norm_grad_fake,  # by_torch would make it a guard how many tokens there are
    )
)


def _add_norm(
    y: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centre: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """h = y + residual, and the norm of h: a LayerNorm if centre -> (h, normed, mean, rstd)."""
    h = residual + y
    if centre:
        return h, *_layer_norm(h, weight, bias, eps)
    normed, rstd = _rms_norm(h, weight, eps)
    return h, normed, None, rstd


add_norm = primitive(
    Primitive(
        "add_norm(Tensor y, Tensor residual, Tensor weight, Tensor? bias, float eps, bool centre) "
        "-> h, normed, mean if centre, rstd",
        _add_norm,
        launcher("reduce", "add_norm", "eps", "centre"),
        lambda layer: (layer.x(), layer.x(), *_layer_norm_sample(layer)[1:], layer.bias),
        _takes,
    )
)
