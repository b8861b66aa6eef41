"""Up-projection, activation, down-projection as one differentiable operator.

T tokens, K features in, F features between, N features out:

    x    (T, K)      w_up  (F, K)      b_up  (F,)      w_down  (N, F)      b_down  (N,)

    forward   z = x w_upᵀ + b_up,  h = act(z),  y = h w_downᵀ + b_down      two kernels
    backward  dz = (dy w_down) * act'(z),  db_up = dz.sum(0)                one kernel: dh is never written
              dw_down = dyᵀ act(z),  db_down = dy.sum(0)
              dx = dz w_up,  dw_up = dzᵀ x

Saved for backward: x, z and both weights; h is computed again from z. As a second output z stays connected
with the inputs: second derivatives come back to backward as dz.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from tpkernels.dispatch import primitives
from tpkernels.kernels.activations import Activation, Glu, act_ref, require_activation
from tpkernels.kernels.recipe import Recipe
from tpkernels.ops.gated_mlp import gated_mlp
from tpkernels.ops.inputs import (
    Context,
    any_requires_grad,
    apply,
    as_dtype,
    autocast,
    check_linear,
    connected,
    features_of,
    is_casting,
    like_tokens,
    tokens_of,
)
from tpkernels.ops.tensor_parallel.layout import Layout
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
    """act(x w_upᵀ + b_up) w_downᵀ + b_down, or the gated form with `w_gate`.

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
        glu = cast("Glu", activation or "swiglu")
        return gated_mlp(x, w_gate, w_up, w_down, b_down, kind=glu, quantize=quantize)
    activation = cast("Activation", activation or "gelu_tanh")
    require_activation("mlp", activation)
    if is_casting(x):
        x, w_up, b_up, w_down, b_down = autocast(x, w_up, b_up, w_down, b_down)
    check_linear("mlp", x, features_of("mlp", x), w_up, b_up, ("w_up", "b_up"))
    check_linear("mlp", x, w_up.shape[0], w_down, b_down, ("w_down", "b_down"))
    if quantize is not None:
        alone, none = Layout(None).in_fp8("mlp", quantize, x), [None] * 2
        y = up_and_down("mlp", tokens_of(x), [w_up], b_up, w_down, b_down, none, alone, activation)
        return like_tokens(y, x)
    keep_z = any_requires_grad(x, w_up, b_up, w_down, b_down)
    y, _ = apply(_Mlp, tokens_of(x), w_up, b_up, w_down, b_down, activation, keep_z)
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
    def backward(ctx: Context, dy: Tensor | None, dz_too: Tensor | None) -> tuple[Tensor | None, ...]:
        """dz_too: what a second derivative adds"""
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
