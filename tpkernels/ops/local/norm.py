"""RMSNorm and LayerNorm over the features of each token, as differentiable operators.

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

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tpkernels.dispatch import norms
from tpkernels.kernels.reference import (
    layer_norm_bwd_ref,
    layer_norm_ref,
    rms_norm_bwd_ref,
    rms_norm_ref,
)
from tpkernels.ops import spmd_rules
from tpkernels.ops.inputs import (
    Context,
    as_dtype,
    computed,
    features_of,
    in_forward_mode,
    like_tokens,
    tokens_of,
)
from tpkernels.ops.token_norm import Norm, token_norm
from tpkernels.tp_invariance import given_or_default


def rms_norm(
    x: Tensor,
    weight: Tensor,
    *,
    eps: float = 1e-5,
    group: ProcessGroup | None = None,
    tp_invariant: int | None = None,
) -> Tensor:
    """Normalize x by its root mean square: x / rms(x) * weight.

    x: (..., features)
    weight: (features,), in the dtype of x or fp32
    group: its ranks have the other tokens (dimension 0); the gradient of weight is summed over them
    tp_invariant: segments of TP-invariance; None: as `tpkernels.tp_invariant` says
    """
    return _norm("rms_norm", x, weight, None, eps, group, tp_invariant)


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    group: ProcessGroup | None = None,
    tp_invariant: int | None = None,
) -> Tensor:
    """Normalize x to zero mean and unit variance; return it times weight plus bias.

    x: (..., features)
    weight, bias: (features,), in the dtype of x or fp32
    group: its ranks have the other tokens (dimension 0); gradients of weight and bias are summed over them
    tp_invariant: segments of TP-invariance; None: as `tpkernels.tp_invariant` says
    """
    return _norm("layer_norm", x, weight, bias, eps, group, tp_invariant)


def _norm(
    kind: Norm,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    group: ProcessGroup | None,
    tp_invariant: int | None,
) -> Tensor:
    segments = given_or_default(tp_invariant)
    features = features_of(kind, x)
    if not x.is_floating_point():
        raise TypeError(f"{kind}: expected floating-point tensors, got x in {x.dtype}")
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None:
            _check_parameter(kind, name, parameter, x, features)
    tokens, recorded = tokens_of(x), torch.is_grad_enabled() or in_forward_mode()
    if segments or (recorded and group is not None):
        y = token_norm(kind, x, tokens, weight, bias, eps, group if recorded else None, segments)
    elif kind == "rms_norm":
        y = computed(_RmsNorm, tokens, weight, eps)
    else:
        y = computed(_LayerNorm, tokens, weight, bias, eps)
    return like_tokens(y, x)


def _check_parameter(op: str, name: str, parameter: Tensor, x: Tensor, features: int) -> None:
    if (  # the usual case costs these looks
        parameter.shape == (features,)
        and parameter.dtype in (x.dtype, torch.float32)
        and ((x.is_cpu and parameter.is_cpu) or parameter.device == x.device)
    ):
        return
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


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, rstd = norms.rms_norm(x, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        ctx.eps = eps
        return y

    @staticmethod
    def spmd_typecheck(*, x: Tensor, weight: Tensor) -> spmd_rules.Typed:
        return spmd_rules.einsum("t_,_->t_", x, weight)

    @staticmethod
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        needs_dx, needs_dw, _ = ctx.needs_input_grad
        if torch.is_grad_enabled():  # what was saved is constant, and what is overwritten has no derivative
            _, rstd = rms_norm_ref(x, weight, ctx.eps)
            dx, dw = rms_norm_bwd_ref(dy, x, weight, rstd)
        else:
            dx, dw = norms.rms_norm_grad(dy, x, weight, rstd)
        return dx if needs_dx else None, as_dtype(dw, weight.dtype) if needs_dw else None, None


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        y, mean, rstd = norms.layer_norm(x, weight, bias, eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.eps = eps
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y

    @staticmethod
    def spmd_typecheck(*, x: Tensor, weight: Tensor, bias: Tensor | None) -> spmd_rules.Typed:
        return spmd_rules.einsum("t_,_,_->t_", x, weight, bias)

    @staticmethod
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        needs_dx, needs_dw, needs_db, _ = ctx.needs_input_grad
        if torch.is_grad_enabled():  # torch's own fused gradient has no derivative in all it depends on
            _, mean, rstd = layer_norm_ref(x, weight, None, ctx.eps)
            dx, dw, db = layer_norm_bwd_ref(dy, x, weight, mean, rstd)
        else:
            dx, dw, db = norms.layer_norm_grad(dy, x, weight, mean, rstd)
        return (
            dx if needs_dx else None,
            as_dtype(dw, weight.dtype) if needs_dw else None,
            as_dtype(db, ctx.bias_dtype) if needs_db else None,
            None,
        )
