"""A unit (an activation of one product, or a gate of two) and an MLP, as differentiable operators.

T tokens, K features in, F features between, N features out:

    x    (T, K)      w_up, w_gate  (F, K)      b_up  (F,)      w_down  (N, F)      b_down  (N,)

    unit      z = x w_upᵀ + b_up,  h = act(z)                       one kernel
    dz        dh * act'(z),  db_up = dz.sum(0)
              dx = dz w_up,  dw_up = dzᵀ x
    gated     g = x w_gateᵀ,  u = x w_upᵀ,  h = f(g) * u            one kernel, two accumulators
    dg, du    dh * u * f'(g),  dh * f(g)
              dx = dg w_gate + du w_up,  dw_gate = dgᵀ x,  dw_up = duᵀ x
    MLP       y = h w_downᵀ + b_down
              dz, or dg, du and h, from dh = dy w_down              one kernel: dh is never written
              dw_down = dyᵀ h,  db_down = dy.sum(0)

Saved for backward: what gradients need of x and the weights, and z, or g and u; h is computed again. As
further outputs z, or g and u, stay connected with the inputs: second derivatives come back to backward as
their gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_compiling

from tpkernels.dispatch import gates, primitives
from tpkernels.kernels.activations import GATE_OF, Activation, Glu, act_ref, require_activation, require_glu
from tpkernels.kernels.recipe import Recipe
from tpkernels.ops import spmd_rules
from tpkernels.ops.inputs import (
    Context,
    any_requires_grad,
    apply,
    as_dtype,
    autocast,
    check_linear,
    computed,
    features_of,
    is_casting,
    like_tokens,
    tokens_of,
)
from tpkernels.ops.matmul import gradient_sum
from tpkernels.ops.quantized.products import between_gradients
from tpkernels.ops.tensor_parallel.column_linear import column
from tpkernels.ops.tensor_parallel.parallel import ALONE, strategy_of
from tpkernels.ops.tensor_parallel.parallel_mlp import up_and_down


def swiglu(
    x: Tensor, w_gate: Tensor, w_up: Tensor, *, kind: Glu = "swiglu", quantize: Recipe | None = None
) -> Tensor:
    """Compute silu(x w_gateᵀ) * (x w_upᵀ), or with gelu for silu.

    Within an MLP use `mlp`, whose down-projection computes the gradients of both products as it computes dh.

    x: (..., in_features)
    w_gate, w_up: (out_features, in_features)
    kind: swiglu, geglu or geglu_tanh
    quantize: compute it in fp8
    returns: (..., out_features)
    """
    require_glu("swiglu", kind)
    if is_casting(x):
        x, w_gate, w_up = autocast(x, w_gate, w_up)
    _check_gated("swiglu", x, w_gate, w_up)
    tokens = tokens_of(x)
    if quantize is not None:
        fp8, none = strategy_of("swiglu", ALONE, quantize, x), [None] * 2
        u, g = column("swiglu", tokens, [w_up, w_gate], none, none, ALONE, fp8, "none")
        return like_tokens(apply(_Gate, u, g, kind), x)
    return like_tokens(unit_and_down(kind, tokens, w_gate, w_up, None, None, None), x)


def gated(g: Tensor, u: Tensor, *, kind: Glu = "swiglu") -> Tensor:
    """Compute silu(g) * u of two given tensors, or with gelu for silu.

    Where g and u are products, `swiglu` and `mlp` compute it with them.

    g, u: (..., features), of one shape, dtype and device
    kind: swiglu, geglu or geglu_tanh
    returns: (..., features)
    """
    require_glu("gated", kind)
    if g.shape != u.shape or g.dtype != u.dtype or g.device != u.device or not g.is_floating_point():
        given = [f"{tuple(t.shape)} in {t.dtype} on {t.device}" for t in (g, u)]
        raise ValueError(
            f"gated: expected floating-point g and u of one shape, dtype and device, got {', '.join(given)}"
        )
    features_of("gated", g)
    return like_tokens(computed(_Gate, tokens_of(u), tokens_of(g), kind), g)


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
        _check_gated("mlp", x, w_gate, w_up)
    check_linear("mlp", x, w_up.shape[0], w_down, b_down, ("w_down", "b_down"))
    if quantize is not None:
        fp8, ups = strategy_of("mlp", ALONE, quantize, x), [w_up] if w_gate is None else [w_up, w_gate]
        none = [None] * (1 + len(ups))
        options = "mlp", ALONE, fp8, unit, None
        (y,) = up_and_down(options, tokens_of(x), ups, b_up, w_down, b_down, none)
        return like_tokens(y, x)
    return like_tokens(unit_and_down(unit, tokens_of(x), w_gate, w_up, b_up, w_down, b_down), x)


def _check_gated(op: str, x: Tensor, w_gate: Tensor, w_up: Tensor) -> None:
    """Raise unless both weights fit x and have one shape."""
    check_linear(op, x, features_of(op, x), w_gate, None, ("w_gate", ""))
    check_linear(op, x, features_of(op, x), w_up, None, ("w_up", ""))
    if w_gate.shape != w_up.shape:
        raise ValueError(
            f"{op}: expected w_gate and w_up of one shape, got {tuple(w_gate.shape)} and {tuple(w_up.shape)}"
        )


def unit_and_down(unit: Activation | Glu, *tensors: Tensor | None) -> Tensor:
    """Compute a unit, or an MLP.

    tensors: x (tokens, features), w_gate, w_up, b_up, w_down, b_down; without w_down the result is h
    """
    y: Tensor
    y, *_ = computed(_UnitAndDown, unit, any_requires_grad(*tensors), *tensors)
    return y


class _UnitAndDown(torch.autograd.Function):
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
        w_down: Tensor | None,
        b_down: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        if w_gate is None:
            y, *zs = primitives.linear(x, w_up, b_up, unit, keep_zs)  # type: ignore[arg-type]
        else:
            y, *zs = primitives.glu(x, w_gate, w_up, unit, keep_zs)  # type: ignore[arg-type]
        if w_down is not None:
            y, _ = primitives.linear(y, w_down, b_down, "none", False)
        _, _, needs_dx, needs_dw_gate, needs_dw_up, *_ = ctx.needs_input_grad
        kept = x if needs_dw_gate or needs_dw_up else None, *((w_gate, w_up) if needs_dx else (None, None))
        ctx.save_for_backward(*kept, w_down, *zs)
        ctx.set_materialize_grads(False)  # zs have gradients in second derivatives only
        ctx.unit = unit
        # compiled code has no second derivatives, and would add the zeros that stand for gradients of zs
        return y, *(None if is_compiling() else z for z in zs)

    @staticmethod
    def spmd_typecheck(
        *,
        x: Tensor,
        w_gate: Tensor | None,
        w_up: Tensor,
        b_up: Tensor | None,
        w_down: Tensor | None,
        b_down: Tensor | None,
    ) -> tuple[spmd_rules.Typed, ...]:
        ups = [w_up] if w_gate is None else [w_gate, w_up]
        zs = [spmd_rules.einsum("tk,nk,n->tn", x, up, b_up) for up in ups]
        h = zs[0] if len(zs) == 1 else spmd_rules.einsum("tn,tn->tn", *zs)
        return h if w_down is None else spmd_rules.einsum("tn,kn,k->tk", h, w_down, b_down), *zs

    @staticmethod
    def backward(ctx: Context, dy: Tensor | None, *dzs_too: Tensor | None) -> tuple[Tensor | None, ...]:
        """dzs_too: the gradients of zs, which only a second derivative has"""
        (x, w_gate, w_up, w_down, *zs), unit = ctx.saved_tensors, ctx.unit
        *_, needs_dx, needs_dw_gate, needs_dw_up, needs_db_up, needs_dw_down, needs_db_down = (
            ctx.needs_input_grad
        )
        if dy is None:
            if all(dz is None for dz in dzs_too):
                return (None,) * 8
            dy = zs[0].new_zeros(zs[0].shape[0], zs[0].shape[1] if w_down is None else w_down.shape[0])
        needs_dzs = needs_dx or needs_dw_gate or needs_dw_up or needs_db_up
        dx = dw_gate = dw_up = db_up = dw_down = h = None
        if w_down is None:
            dzs = between_gradients(dy, zs[::-1], unit)[::-1]
        elif len(zs) == 2 and (needs_dzs or needs_dw_down):
            *dzs, h = primitives.dglu(dy, w_down, zs[0], zs[1], unit)
        elif needs_dzs:
            *dzs, db_up = primitives.dgrad_act(dy, w_down, zs[0], unit, needs_db_up)
        if needs_dzs:
            if any(dz is not None for dz in dzs_too):
                dzs = [dz if too is None else dz + too for dz, too in zip(dzs, dzs_too, strict=True)]
                db_up = None
            if needs_dx:
                ups = [w_up] if len(zs) == 1 else [w_gate, w_up]
                dx = gradient_sum([*zip(dzs, ups, strict=True)])
            dw_gate = primitives.wgrad(dzs[0], x) if needs_dw_gate else None
            dw_up = primitives.wgrad(dzs[-1], x) if needs_dw_up else None
            if needs_db_up:
                db_up = as_dtype(primitives.bias_grad(dzs[-1]) if db_up is None else db_up, dy.dtype)
        if needs_dw_down:
            dw_down = primitives.wgrad(dy, act_ref(zs[0], unit) if h is None else h)
        db_down = as_dtype(primitives.bias_grad(dy), dy.dtype) if needs_db_down else None
        return None, None, dx, dw_gate, dw_up, db_up, dw_down, db_down


class _Gate(torch.autograd.Function):
    """The gate f(g) * u of two tensors."""

    @staticmethod
    def forward(ctx: Context, u: Tensor, g: Tensor, kind: Glu) -> Tensor:
        ctx.save_for_backward(u, g)
        ctx.kind = kind
        return gates.activate(g, u, GATE_OF[kind])

    @staticmethod
    def spmd_typecheck(*, u: Tensor, g: Tensor) -> spmd_rules.Typed:
        return spmd_rules.einsum("tn,tn->tn", u, g)

    @staticmethod
    def backward(ctx: Context, dh: Tensor) -> tuple[Tensor | None, ...]:
        u, g = ctx.saved_tensors
        dg, du = gates.glu_grad(dh, g, u, ctx.kind)
        return du, dg, None
