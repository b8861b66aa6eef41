"""A gated unit, f(x Wgᵀ) * (x Wuᵀ), as one differentiable operator.

T tokens, K in_features, N out_features:

    x    (T, K)      w_gate, w_up  (N, K)

    forward   g = x w_gateᵀ,  u = x w_upᵀ,  h = f(g) * u        one kernel, two accumulators
    dg, du    dh * u * f'(g),  dh * f(g)
    dgrad     dx = dg w_gate + du w_up
    wgrad     dw_gate = dgᵀ x,  dw_up = duᵀ x

Saved for backward: x, both weights, g and u. Within an MLP use `ops.mlp`, whose down-projection computes dg
and du as it computes dh.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tpkernels.dispatch import primitives
from tpkernels.kernels.activations import GATE_OF, Glu, act_grad_ref, act_ref, require_glu
from tpkernels.kernels.recipe import Recipe
from tpkernels.ops import spmd_rules
from tpkernels.ops.inputs import (
    Context,
    any_requires_grad,
    apply,
    autocast,
    check_linear,
    computed,
    features_of,
    is_casting,
    like_tokens,
    tokens_of,
)
from tpkernels.ops.quantized.products import between, between_gradients
from tpkernels.ops.tensor_parallel.column_linear import column
from tpkernels.ops.tensor_parallel.parallel import ALONE, strategy_of


def swiglu(
    x: Tensor, w_gate: Tensor, w_up: Tensor, *, kind: Glu = "swiglu", quantize: Recipe | None = None
) -> Tensor:
    """Compute silu(x w_gateᵀ) * (x w_upᵀ), or with gelu for silu.

    x: (..., in_features)
    w_gate, w_up: (out_features, in_features)
    kind: swiglu, geglu or geglu_tanh
    quantize: compute it in fp8
    returns: (..., out_features)
    """
    require_glu("swiglu", kind)
    if is_casting(x):
        x, w_gate, w_up = autocast(x, w_gate, w_up)
    check_gated("swiglu", x, w_gate, w_up)
    if quantize is not None:
        fp8, none = strategy_of("swiglu", ALONE, quantize, x), [None] * 2
        u, g = column("swiglu", tokens_of(x), [w_up, w_gate], none, none, ALONE, fp8, "none")
        return like_tokens(apply(_Gate, u, g, kind), x)
    keep_gu = any_requires_grad(x, w_gate, w_up)
    return like_tokens(computed(_Glu, tokens_of(x), w_gate, w_up, kind, keep_gu), x)


def check_gated(op: str, x: Tensor, w_gate: Tensor, w_up: Tensor) -> None:
    """Raise unless both weights fit x and have one shape."""
    check_linear(op, x, features_of(op, x), w_gate, None, ("w_gate", ""))
    check_linear(op, x, features_of(op, x), w_up, None, ("w_up", ""))
    if w_gate.shape != w_up.shape:
        raise ValueError(
            f"{op}: expected w_gate and w_up of one shape, got {tuple(w_gate.shape)} and {tuple(w_up.shape)}"
        )


class _Glu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, w_gate: Tensor, w_up: Tensor, kind: Glu, keep_gu: bool) -> Tensor:
        h, g, u = primitives.glu(x, w_gate, w_up, kind, keep_gu)
        ctx.save_for_backward(x, w_gate, w_up, g, u)
        ctx.gate = GATE_OF[kind]
        return h

    @staticmethod
    def spmd_typecheck(*, x: Tensor, w_gate: Tensor, w_up: Tensor) -> spmd_rules.Typed:
        return spmd_rules.einsum("tk,nk,nk->tn", x, w_gate, w_up)

    @staticmethod
    def backward(ctx: Context, dh: Tensor) -> tuple[Tensor | None, ...]:
        x, w_gate, w_up, g, u = ctx.saved_tensors
        needs_dx, needs_dw_gate, needs_dw_up, *_ = ctx.needs_input_grad
        if torch.is_grad_enabled():  # those that were saved are constant, and have no second derivatives
            g, u = functional.linear(x, w_gate), functional.linear(x, w_up)
        dg, du = act_grad_ref(dh * u, g, ctx.gate), dh * act_ref(g, ctx.gate)
        return (
            primitives.dgrad_pairs(dg, w_gate, du, w_up) if needs_dx else None,
            primitives.wgrad(dg, x) if needs_dw_gate else None,
            primitives.wgrad(du, x) if needs_dw_up else None,
            None,
            None,
        )


class _Gate(torch.autograd.Function):
    """The gate f(g) * u of two products that were computed apart."""

    @staticmethod
    def forward(ctx: Context, u: Tensor, g: Tensor, kind: Glu) -> Tensor:
        ctx.save_for_backward(u, g)
        ctx.kind = kind
        return between((u, g), kind)

    @staticmethod
    def spmd_typecheck(*, u: Tensor, g: Tensor) -> spmd_rules.Typed:
        return spmd_rules.einsum("tn,tn->tn", u, g)

    @staticmethod
    def backward(ctx: Context, dh: Tensor) -> tuple[Tensor | None, ...]:
        return *between_gradients(dh, ctx.saved_tensors, ctx.kind), None
