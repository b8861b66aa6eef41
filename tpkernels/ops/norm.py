"""RMSNorm and LayerNorm of each token as differentiable operators.

T tokens, K features; sums over the features of a token, in fp32 or wider:

    x    (T, K)      weight, bias  (K,)

    forward   mean = Σ x / K,  rstd = 1 / sqrt(Σ (x - mean)² / K + eps)        mean is 0 for RMSNorm
              n = (x - mean) * rstd,  y = n * weight + bias                    one kernel
    dx        rstd * (dn - n * Σ (dn * n) / K - Σ dn / K),  dn = dy * weight   the last for LayerNorm only
    dweight   Σ over tokens of dy * n,    dbias = Σ over tokens of dy          in fp32, rounded once

Saved for backward: x, weight, mean and rstd. Parameters may be fp32 where x is narrower; y is in the dtype of
x, in autocast regions too, where nothing is cast: the sums are wide anyway.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from tpkernels.dispatch.steps import Norm, Steps, steps_on
from tpkernels.kernels.reference import (
    layer_norm_bwd_ref,
    layer_norm_ref,
    rms_norm_bwd_ref,
    rms_norm_ref,
)
from tpkernels.ops import registered
from tpkernels.ops.inputs import as_dtype, compiling, features_of, like_tokens, tokens_of


def rms_norm(x: Tensor, weight: Tensor, *, eps: float = 1e-5) -> Tensor:
    """x / rms(x) * weight.

    x: (..., features)
    weight: (features,), in the dtype of x or fp32
    """
    return _norm("rms_norm", x, weight, None, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, eps: float = 1e-5) -> Tensor:
    """x, centred and scaled to unit variance, times weight plus bias.

    x: (..., features)
    weight, bias: (features,), in the dtype of x or fp32
    """
    return _norm("layer_norm", x, weight, bias, eps)


def _norm(kind: Norm, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    features = features_of(kind, x)
    if not x.is_floating_point():
        raise TypeError(f"{kind}: expected floating-point tensors, got x in {x.dtype}")
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None:
            _check_parameter(kind, name, parameter, x, features)
    arguments = tokens_of(x), weight, bias, kind, eps
    y: Tensor
    if compiling(kind):
        y = registered.norm(*arguments)[0]
    else:
        y = _Norm.apply(*arguments)  # type: ignore[no-untyped-call]
    return like_tokens(y, x)


def _check_parameter(op: str, name: str, parameter: Tensor, x: Tensor, features: int) -> None:
    if tuple(parameter.shape) != (features,):
        raise ValueError(
            f"{op}: expected {name} ({features},) for x {tuple(x.shape)}, got {tuple(parameter.shape)}"
        )
    if parameter.dtype not in (x.dtype, torch.float32):
        raise TypeError(
            f"{op}: expected {name} in {x.dtype} like x, or in torch.float32, got {parameter.dtype}; "
            "cast one of them"
        )
    if parameter.device != x.device:
        raise ValueError(
            f"{op}: expected one device, got x on {x.device} and {name} on {parameter.device}; move one"
        )


class _Norm(torch.autograd.Function):
    """The eager way, straight to the kernels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, kind: Norm, eps: float) -> Tensor:
        outputs = steps_on(x.device).norm(x, weight, bias, kind, eps)
        _save(ctx, (x, weight, bias, kind, eps), outputs)
        return outputs[0]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return *_gradients(ctx, steps_on(dy.device), dy), None, None


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
    x, weight, bias, ctx.kind, ctx.eps = inputs
    _, mean, rstd = output
    ctx.save_for_backward(x, weight, mean, rstd)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _gradients(ctx: Any, steps: Steps, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    x, weight, mean, rstd = ctx.saved_tensors
    needs_dx, needs_dw, needs_db, *_ = ctx.needs_input_grad
    if torch.is_grad_enabled():
        dx, dw, db = _differentiable_gradients(ctx, dy, x, weight)
    else:
        dx, dw, db = steps.norm_grad(dy, x, weight, mean, rstd, ctx.kind)
    return (
        dx if needs_dx else None,
        as_dtype(dw, weight.dtype) if needs_dw else None,
        None if db is None or not needs_db else as_dtype(db, ctx.bias_dtype),
    )


def _differentiable_gradients(
    ctx: Any, dy: Tensor, x: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(dx, dw, db) with statistics taken again, for what was saved of them is constant."""
    if ctx.kind == "rms_norm":
        _, _, rstd = rms_norm_ref(x, weight, ctx.eps)
        return *rms_norm_bwd_ref(dy, x, weight, rstd), None
    _, _, mean, rstd = layer_norm_ref(x, weight, None, ctx.eps)
    return layer_norm_bwd_ref(dy, x, weight, mean, rstd)


def _registered_backward(
    ctx: FunctionCtx, dy: Tensor, dmean: Tensor | None, drstd: Tensor | None
) -> tuple[Tensor | None, ...]:
    # nobody sees mean and rstd, so their gradients say nothing
    return *_gradients(ctx, cast("Steps", registered), dy), None, None


registered.norm.register_autograd(_registered_backward, setup_context=_save)
