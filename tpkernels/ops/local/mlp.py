"""Up-projection, activation or gated unit, and down-projection as one differentiable operator.

T tokens, K features in, F features between, N features out:

    x    (T, K)      w_up, w_gate  (F, K)      b_up  (F,)      w_down  (N, F)      b_down  (N,)

    forward   z = x w_upᵀ + b_up,  h = act(z),  y = h w_downᵀ + b_down      two kernels
    backward  dz = (dy w_down) * act'(z),  db_up = dz.sum(0)                one kernel: dh is never written
              dw_down = dyᵀ act(z),  db_down = dy.sum(0)
              dx = dz w_up,  dw_up = dzᵀ x

Saved for backward: x, z and both weights; h is computed again from z. As a second output z stays connected
with the inputs: second derivatives come back to backward as dz. With w_gate instead:

    forward   g = x w_gateᵀ,  u = x w_upᵀ,  h = f(g) * u,  y = h w_downᵀ + b_down       two kernels
    backward  dh = dy w_down,  dg = dh * u * f'(g),  du = dh * f(g),  h again           one kernel
              dw_down = dyᵀ h,  db_down = dy.sum(0)
              dx = dg w_gate + du w_up,  dw_gate = dgᵀ x,  dw_up = duᵀ x

Saved for backward: x, g, u and the weights; h is emitted again with dg and du.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tpkernels.dispatch import primitives
from tpkernels.kernels.activations import Activation, Glu, act_ref, require_activation, require_glu
from tpkernels.kernels.recipe import Recipe
from tpkernels.ops import spmd_rules
from tpkernels.ops.inputs import (
    Context,
    any_requires_grad,
    as_dtype,
    autocast,
    check_linear,
    computed,
    connected,
    features_of,
    is_casting,
    like_tokens,
    tokens_of,
)
from tpkernels.ops.local.swiglu import check_gated, gate_and_up, input_and_weight_gradients
from tpkernels.ops.tensor_parallel.parallel import ALONE, strategy_of
from tpkernels.ops.tensor_parallel.parallel_mlp import up_and_down


def mlp(
    x: Tensor,
    w_up: Tensor,
    b_up: Tensor | None,
    w_down: Tensor,
    b_down: Tensor | None,
    *,
    activation: Activation | Glu | None = None,
    w_gate: Tensor | None = None,
    quantize: Recipe | None = None,
) -> Tensor:
    """Compute act(x w_upᵀ + b_up) w_downᵀ + b_down, or the gated form with `w_gate`.

    x: (..., in_features)
    w_up, w_gate: (between, in_features)
    b_up: (between,)
    w_down: (out_features, between)
    b_down: (out_features,)
    activation: gelu_tanh unless given; with w_gate swiglu (the default), geglu or geglu_tanh
    quantize: compute it in fp8
    returns: (..., out_features)
    """
    if w_gate is not None:
        if b_up is not None:
            raise ValueError("mlp: expected no b_up with w_gate, a gated unit has no biases; pass None")
        kind = activation or "swiglu"
        return _gated_mlp(x, w_gate, w_up, w_down, b_down, kind=kind, quantize=quantize)
    activation = activation or "gelu_tanh"
    require_activation("mlp", activation)
    if is_casting(x):
        x, w_up, b_up, w_down, b_down = autocast(x, w_up, b_up, w_down, b_down)
    check_linear("mlp", x, features_of("mlp", x), w_up, b_up, ("w_up", "b_up"))
    check_linear("mlp", x, w_up.shape[0], w_down, b_down, ("w_down", "b_down"))
    if quantize is not None:
        fp8, none = strategy_of("mlp", ALONE, quantize, x), [None] * 2
        y = up_and_down("mlp", tokens_of(x), [w_up], b_up, w_down, b_down, none, ALONE, fp8, activation)
        return like_tokens(y, x)
    keep_z = any_requires_grad(x, w_up, b_up, w_down, b_down)
    y, _ = computed(_Mlp, tokens_of(x), w_up, b_up, w_down, b_down, activation, keep_z)
    return like_tokens(y, x)


class _Mlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        w_up: Tensor,
        b_up: Tensor | None,
        w_down: Tensor,
        b_down: Tensor | None,
        activation: Activation,
        keep_z: bool,
    ) -> tuple[Tensor, Tensor | None]:
        h, z = primitives.linear(x, w_up, b_up, activation, keep_z)
        y, _ = primitives.linear(h, w_down, b_down, "none", False)
        ctx.save_for_backward(x, w_up, w_down, z)
        ctx.set_materialize_grads(False)  # z has a gradient in second derivatives only
        ctx.activation = activation
        ctx.bias_dtypes = [None if bias is None else bias.dtype for bias in (b_up, b_down)]
        return y, connected(z)

    @staticmethod
    def spmd_typecheck(
        *, x: Tensor, w_up: Tensor, b_up: Tensor | None, w_down: Tensor, b_down: Tensor | None
    ) -> spmd_rules.Typed:
        z = spmd_rules.einsum("tk,nk,n->tn", x, w_up, b_up)
        return spmd_rules.einsum("tn,kn,k->tk", z, w_down, b_down), z

    @staticmethod
    def backward(ctx: Context, dy: Tensor | None, dz_too: Tensor | None) -> tuple[Tensor | None, ...]:
        """dz_too: the gradient of z, which only a second derivative has"""
        x, w_up, w_down, z = ctx.saved_tensors
        needs_dx, needs_dw_up, needs_db_up, needs_dw_down, needs_db_down, *_ = ctx.needs_input_grad
        dx = dw_up = db_up = dw_down = db_down = None
        if dy is None:
            if dz_too is None:
                return (None,) * 7
            dy = dz_too.new_zeros(dz_too.shape[0], w_down.shape[0])
        if needs_dx or needs_dw_up or needs_db_up:
            dz, db = primitives.dgrad_act(dy, w_down, z, ctx.activation, needs_db_up)
            if dz_too is not None:
                dz = dz + dz_too
                db = primitives.bias_grad(dz) if needs_db_up else None
            dx = primitives.dgrad(dz, w_up) if needs_dx else None
            dw_up = primitives.wgrad(dz, x) if needs_dw_up else None
            db_up = None if db is None else as_dtype(db, ctx.bias_dtypes[0])
        if needs_dw_down:
            dw_down = primitives.wgrad(dy, act_ref(z, ctx.activation))
        if needs_db_down:
            db_down = as_dtype(primitives.bias_grad(dy), ctx.bias_dtypes[1])
        return dx, dw_up, db_up, dw_down, db_down, None, None


def _gated_mlp(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    b_down: Tensor | None,
    *,
    kind: Activation | Glu,
    quantize: Recipe | None,
) -> Tensor:
    """Compute (f(x w_gateᵀ) * (x w_upᵀ)) w_downᵀ + b_down, with the activation f of `kind`."""
    require_glu("mlp", kind)
    if is_casting(x):
        x, w_gate, w_up, w_down, b_down = autocast(x, w_gate, w_up, w_down, b_down)
    check_gated("mlp", x, w_gate, w_up)
    check_linear("mlp", x, w_up.shape[0], w_down, b_down, ("w_down", "b_down"))
    if quantize is not None:
        ups, none, fp8 = [w_up, w_gate], [None] * 3, strategy_of("mlp", ALONE, quantize, x)
        y = up_and_down("mlp", tokens_of(x), ups, None, w_down, b_down, none, ALONE, fp8, kind)
        return like_tokens(y, x)
    keep_gu = any_requires_grad(x, w_gate, w_up, w_down, b_down)
    return like_tokens(computed(_GatedMlp, tokens_of(x), w_gate, w_up, w_down, b_down, kind, keep_gu), x)


class _GatedMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        w_gate: Tensor,
        w_up: Tensor,
        w_down: Tensor,
        b_down: Tensor | None,
        kind: Glu,
        keep_gu: bool,
    ) -> Tensor:
        h, g, u = primitives.glu(x, w_gate, w_up, kind, keep_gu)
        y, _ = primitives.linear(h, w_down, b_down, "none", False)
        ctx.save_for_backward(x, w_gate, w_up, w_down, g, u)
        ctx.kind = kind
        ctx.bias_dtype = None if b_down is None else b_down.dtype
        return y

    @staticmethod
    def spmd_typecheck(
        *, x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, b_down: Tensor | None
    ) -> spmd_rules.Typed:
        h = spmd_rules.einsum("tk,nk,nk->tn", x, w_gate, w_up)
        return spmd_rules.einsum("tn,kn,k->tk", h, w_down, b_down)

    @staticmethod
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, w_gate, w_up, w_down, g, u = ctx.saved_tensors
        needs = ctx.needs_input_grad
        if torch.is_grad_enabled():
            g, u = gate_and_up(x, w_gate, w_up)
        dx = dw_gate = dw_up = dw_down = None
        if any(needs[:4]):
            dg, du, h = primitives.dglu(dy, w_down, g, u, ctx.kind)
            dx, dw_gate, dw_up = input_and_weight_gradients(needs, x, w_gate, w_up, dg, du)
            dw_down = primitives.wgrad(dy, h) if needs[3] else None
        db_down = as_dtype(primitives.bias_grad(dy), ctx.bias_dtype) if needs[4] else None
        return dx, dw_gate, dw_up, dw_down, db_down, None, None
