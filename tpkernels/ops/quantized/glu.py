"""What lies between the products of an MLP in fp8, and the gated unit alone. See `ops.swiglu`.

T tokens, K in_features, N out_features; ^ marks rows in fp8:

    forward   g = x̂ ŵ_gateᵀ,  u = x̂ ŵ_upᵀ,  h = f(g) * u
    backward  dg = dh * u * f'(g),  du = dh * f(g);  dx, dw_gate and dw_up as of `column_linear`

Saved for backward: x, both weights, g and u. What no gradient needs is not saved.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tpkernels.kernels.activations import GATE_OF, Activation, Glu, act_grad_ref, act_ref
from tpkernels.ops.first_order import first_order
from tpkernels.ops.inputs import Context
from tpkernels.ops.quantized.column_linear import column_forward, column_gradients
from tpkernels.ops.quantized.limits import require_quantizable
from tpkernels.ops.quantized.span import Span
from tpkernels.ops.tensor_parallel.operands import apply_distinct, recorded


def between(zs: Sequence[Tensor], activation: Activation, glu: Glu | None) -> Tensor:
    """h of z, or of u and g"""
    if glu is None:
        return act_ref(zs[0], activation)
    u, g = zs
    return act_ref(g, GATE_OF[glu]) * u


def between_gradients(
    dh: Tensor, zs: Sequence[Tensor], activation: Activation, glu: Glu | None
) -> list[Tensor]:
    if glu is None:
        return [act_grad_ref(dh, zs[0], activation)]
    u, g = zs
    return [dh * act_ref(g, GATE_OF[glu]), act_grad_ref(dh * u, g, GATE_OF[glu])]


def quantized_glu(x: Tensor, w_gate: Tensor, w_up: Tensor, span: Span, glu: Glu) -> Tensor:
    """(tokens, features). x: (tokens, features), checked and cast"""
    require_quantizable("swiglu", span.recipe, x)
    if recorded(x, w_gate, w_up):
        h: Tensor = apply_distinct(_QuantizedGlu, (span, glu), tensors=[x, w_up, w_gate])
        return h
    return between(column_forward(x, [w_up, w_gate], [None] * 2, span, "none", False, False), "none", glu)


class _QuantizedGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, options: tuple[Span, Glu], x: Tensor, w_up: Tensor, w_gate: Tensor) -> Tensor:
        span, glu = options
        _, needs_dx, *needs_dws = ctx.needs_input_grad
        zs = column_forward(x, [w_up, w_gate], [None] * 2, span, "none", False, keep=True)
        kept = [w_up, w_gate] if needs_dx else [None] * 2
        ctx.options, ctx.features = options, x.shape[1]
        ctx.save_for_backward(x if any(needs_dws) else None, *kept, *zs)
        return between(zs, "none", glu)

    @staticmethod
    @first_order("swiglu in fp8", reads_intermediates=True)
    def backward(ctx: Context, dh: Tensor) -> tuple[Tensor | None, ...]:
        span, glu = ctx.options
        x, w_up, w_gate, *zs = ctx.saved_tensors
        dzs, needs = between_gradients(dh, zs, "none", glu), [*ctx.needs_input_grad[1:], False, False]
        none = [None] * 2
        grads = column_gradients(needs, dzs, x, [w_up, w_gate], [], none, ctx.features, span, "none", False)
        return None, *grads[:3]
