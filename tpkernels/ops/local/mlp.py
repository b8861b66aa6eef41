"""Up-projection, activation or gated unit, and down-projection as one differentiable operator.

T tokens, K features in, F features between, N features out:

    x    (T, K)      w_up, w_gate  (F, K)      b_up  (F,)      w_down  (N, F)      b_down  (N,)

    forward   z = x w_upᵀ + b_up,  h = act(z),  y = h w_downᵀ + b_down      two kernels
    backward  dz = (dy w_down) * act'(z),  db_up = dz.sum(0)                one kernel: dh is never written
              dw_down = dyᵀ act(z),  db_down = dy.sum(0)
              dx = dz w_up,  dw_up = dzᵀ x

With w_gate instead:

    forward   g = x w_gateᵀ,  u = x w_upᵀ,  h = f(g) * u,  y = h w_downᵀ + b_down       two kernels
    backward  dh = dy w_down,  dg = dh * u * f'(g),  du = dh * f(g),  h again           one kernel
              dw_down = dyᵀ h,  db_down = dy.sum(0)
              dx = dg w_gate + du w_up,  dw_gate = dgᵀ x,  dw_up = duᵀ x

Saved for backward: x, the weights, and z, or g and u; h is computed again. As further outputs z, or g and u,
stay connected with the inputs: second derivatives come back to backward as their gradients.
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
from tpkernels.ops.local.swiglu import check_gated
from tpkernels.ops.matmul import gradient_sum
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
    if w_gate is None:
        unit = activation or "gelu_tanh"
        require_activation("mlp", unit)
    else:
        if b_up is not None:
            raise ValueError("mlp: expected no b_up with w_gate, a gated unit has no biases; pass None")
        unit = activation or "swiglu"
        require_glu("mlp", unit)
    if is_casting(x):
        x, w_up, b_up, w_down, b_down, w_gate = autocast(x, w_up, b_up, w_down, b_down, w_gate)
    if w_gate is None:
        check_linear("mlp", x, features_of("mlp", x), w_up, b_up, ("w_up", "b_up"))
    else:
        check_gated("mlp", x, w_gate, w_up)
    check_linear("mlp", x, w_up.shape[0], w_down, b_down, ("w_down", "b_down"))
    ups = [w_up] if w_gate is None else [w_gate, w_up]
    if quantize is not None:
        fp8, none = strategy_of("mlp", ALONE, quantize, x), [None] * (1 + len(ups))
        y = up_and_down("mlp", tokens_of(x), ups[::-1], b_up, w_down, b_down, none, ALONE, fp8, unit)
        return like_tokens(y, x)
    keep_zs = any_requires_grad(x, b_up, w_down, b_down, *ups)
    y, *_ = computed(_Mlp, unit, keep_zs, tokens_of(x), w_gate, w_up, b_up, w_down, b_down)
    return like_tokens(y, x)


class _Mlp(torch.autograd.Function):
    """zs: z, or with w_gate g and u"""

    @staticmethod
    def forward(
        ctx: Context,
        unit: Activation | Glu,
        keep_zs: bool,
        x: Tensor,
        w_gate: Tensor | None,
        w_up: Tensor,
        b_up: Tensor | None,
        w_down: Tensor,
        b_down: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        if w_gate is None:
            h, *zs = primitives.linear(x, w_up, b_up, unit, keep_zs)  # type: ignore[arg-type]
        else:
            h, *zs = primitives.glu(x, w_gate, w_up, unit, keep_zs)  # type: ignore[arg-type]
        y, _ = primitives.linear(h, w_down, b_down, "none", False)
        ctx.save_for_backward(x, w_gate, w_up, w_down, *zs)
        ctx.set_materialize_grads(False)  # zs have gradients in second derivatives only
        ctx.unit = unit
        ctx.bias_dtypes = [None if bias is None else bias.dtype for bias in (b_up, b_down)]
        return y, *map(connected, zs)

    @staticmethod
    def spmd_typecheck(
        *,
        x: Tensor,
        w_gate: Tensor | None,
        w_up: Tensor,
        b_up: Tensor | None,
        w_down: Tensor,
        b_down: Tensor | None,
    ) -> tuple[spmd_rules.Typed, ...]:
        ups = [w_up] if w_gate is None else [w_gate, w_up]
        zs = [spmd_rules.einsum("tk,nk,n->tn", x, up, b_up) for up in ups]
        h = zs[0] if len(zs) == 1 else spmd_rules.einsum("tn,tn->tn", *zs)
        return spmd_rules.einsum("tn,kn,k->tk", h, w_down, b_down), *zs

    @staticmethod
    def backward(ctx: Context, dy: Tensor | None, *dzs_too: Tensor | None) -> tuple[Tensor | None, ...]:
        """dzs_too: the gradients of zs, which only a second derivative has"""
        x, w_gate, w_up, w_down, *zs = ctx.saved_tensors
        _, _, needs_dx, needs_dw_gate, needs_dw_up, needs_db_up, needs_dw_down, needs_db_down = (
            ctx.needs_input_grad
        )
        if dy is None:
            if all(dz is None for dz in dzs_too):
                return (None,) * 8
            dy = zs[0].new_zeros(zs[0].shape[0], w_down.shape[0])
        needs_dzs = needs_dx or needs_dw_gate or needs_dw_up or needs_db_up
        dx = dw_gate = dw_up = db_up = h = None
        if w_gate is not None and (needs_dzs or needs_dw_down):
            *dzs, h = primitives.dglu(dy, w_down, *zs, ctx.unit)
        elif needs_dzs:
            *dzs, db_up = primitives.dgrad_act(dy, w_down, *zs, ctx.unit, needs_db_up)
        if needs_dzs:
            if any(dz is not None for dz in dzs_too):
                dzs = [dz if too is None else dz + too for dz, too in zip(dzs, dzs_too, strict=True)]
                db_up = primitives.bias_grad(dzs[-1])
            ups = [w_up] if w_gate is None else [w_gate, w_up]
            dx = gradient_sum([*zip(dzs, ups, strict=True)]) if needs_dx else None
            dw_gate = primitives.wgrad(dzs[0], x) if needs_dw_gate else None
            dw_up = primitives.wgrad(dzs[-1], x) if needs_dw_up else None
            db_up = as_dtype(db_up, ctx.bias_dtypes[0]) if needs_db_up else None
        if needs_dw_down and h is None:
            h = act_ref(zs[0], ctx.unit)
        dw_down = primitives.wgrad(dy, h) if needs_dw_down else None
        db_down = as_dtype(primitives.bias_grad(dy), ctx.bias_dtypes[1]) if needs_db_down else None
        return None, None, dx, dw_gate, dw_up, db_up, dw_down, db_down
