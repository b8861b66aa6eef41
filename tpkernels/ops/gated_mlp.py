"""Gated up-projection and down-projection as one differentiable operator: `ops.mlp` with `w_gate`.

T tokens, K features in, F features between, N features out:

    x    (T, K)      w_gate, w_up  (F, K)      w_down  (N, F)      b_down  (N,)

    forward   g = x w_gateᵀ,  u = x w_upᵀ,  h = f(g) * u,  y = h w_downᵀ + b_down       two kernels
    backward  dh = dy w_down,  dg = dh * u * f'(g),  du = dh * f(g),  h again           one kernel
              dw_down = dyᵀ h,  db_down = dy.sum(0)
              dx = dg w_gate + du w_up,  dw_gate = dgᵀ x,  dw_up = duᵀ x

Saved for backward: x, g, u and the weights; h is emitted again beside dg and du.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tpkernels.dispatch import primitives
from tpkernels.kernels.activations import Glu, require_glu
from tpkernels.kernels.recipe import Recipe
from tpkernels.ops.inputs import (
    Context,
    any_requires_grad,
    apply,
    as_dtype,
    autocast,
    check_linear,
    is_casting,
    like_tokens,
    tokens_of,
)
from tpkernels.ops.swiglu import check_gated, gate_and_up, input_and_weight_gradients
from tpkernels.ops.tensor_parallel.layout import Layout
from tpkernels.ops.tensor_parallel.parallel_mlp import up_and_down


def gated_mlp(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    b_down: Tensor | None,
    *,
    kind: Glu,
    quantize: Recipe | None = None,
) -> Tensor:
    """(f(x w_gateᵀ) * (x w_upᵀ)) w_downᵀ + b_down, f being the activation of `kind`."""
    require_glu("mlp", kind)
    if is_casting(x):
        x, w_gate, w_up, w_down, b_down = autocast(x, w_gate, w_up, w_down, b_down)
    check_gated("mlp", x, w_gate, w_up)
    check_linear("mlp", x, w_up.shape[0], w_down, b_down, ("w_down", "b_down"))
    if quantize is not None:
        ups, none, alone = [w_up, w_gate], [None] * 3, Layout(None).in_fp8("mlp", quantize, x)
        y = up_and_down("mlp", tokens_of(x), ups, None, w_down, b_down, none, alone, kind)
        return like_tokens(y, x)
    keep_gu = any_requires_grad(x, w_gate, w_up, w_down, b_down)
    return like_tokens(apply(_GatedMlp, tokens_of(x), w_gate, w_up, w_down, b_down, kind, keep_gu), x)


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
