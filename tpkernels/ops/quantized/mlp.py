"""Up-projection, activation or gated unit, down-projection in fp8, over ranks or on one.

T tokens, K features in, F features between, N features out; see `column_linear` and `row_linear` here:

    forward   z = x w_upᵀ + b_up (and the gate's),  h = act(z) or f(g) * u,  y = h w_downᵀ + b_down
    backward  dh, dw_down, db_down as of `row_linear`;  dz = dh * act'(z), or dg and du
              dx, dw_up, db_up (and the gate's) as of `column_linear`

Saved for backward: x (its fp8 rows where they are gathered), z or g and u, and the weights; h is computed
again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tpkernels.kernels.activations import GATE_OF, Activation, Glu, act_grad_ref, act_ref
from tpkernels.ops.first_order import first_order
from tpkernels.ops.inputs import Context
from tpkernels.ops.main_grad import add_if_traced
from tpkernels.ops.quantized.column_linear import column_forward, column_gradients
from tpkernels.ops.quantized.limits import require_quantizable
from tpkernels.ops.quantized.row_linear import row_forward, row_gradients
from tpkernels.ops.quantized.span import Span
from tpkernels.ops.tensor_parallel.operands import apply_distinct, recorded


def quantized_mlp(
    op: str,
    x: Tensor,
    ups: Sequence[Tensor],
    b_up: Tensor | None,
    w_down: Tensor,
    b_down: Tensor | None,
    main_grads: Sequence[Tensor | None],
    span: Span,
    activation: Activation,
    glu: Glu | None,
) -> Tensor:
    """(tokens, features). ups: the weight up, and for `glu` that of the gate behind it"""
    require_quantizable(op, span.recipe, x)
    tensors = [x, b_up, b_down, *ups, w_down]
    options = span, activation, glu
    if recorded(*tensors):
        y: Tensor = apply_distinct(_QuantizedMlp, options, main_grads, tensors=tensors)
        return y
    zs = column_forward(x, ups, [b_up, *[None] * (len(ups) - 1)], span, "none", False, False)
    return row_forward(_between(zs, activation, glu), w_down, b_down, span)


def _between(zs: Sequence[Tensor], activation: Activation, glu: Glu | None) -> Tensor:
    """h"""
    if glu is None:
        return act_ref(zs[0], activation)
    u, g = zs
    return act_ref(g, GATE_OF[glu]) * u


def _between_gradients(
    dh: Tensor, zs: Sequence[Tensor], activation: Activation, glu: Glu | None
) -> list[Tensor]:
    if glu is None:
        return [act_grad_ref(dh, zs[0], activation)]
    u, g = zs
    return [dh * act_ref(g, GATE_OF[glu]), act_grad_ref(dh * u, g, GATE_OF[glu])]


class _QuantizedMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        options: tuple[Span, Activation, Glu | None],
        main_grads: Sequence[Tensor | None],
        x: Tensor,
        b_up: Tensor | None,
        b_down: Tensor | None,
        *weights: Tensor,
    ) -> Tensor:
        span, activation, glu = options
        *ups, w_down = weights
        results = column_forward(x, ups, [b_up, *[None] * (len(ups) - 1)], span, "none", False, keep=True)
        kept = results.pop() if span.token_shards > 1 else x
        y = row_forward(_between(results, activation, glu), w_down, b_down, span)
        ctx.options, ctx.main_grads = options, main_grads
        ctx.save_for_backward(kept, *weights, *results)
        return y

    @staticmethod
    @first_order("mlp in fp8", reads_intermediates=True)
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        span, activation, glu = ctx.options
        count, main_grads = len(ctx.main_grads), ctx.main_grads
        x, *saved = ctx.saved_tensors
        (*ups, w_down), zs = saved[:count], saved[count:]
        needs_dx, needs_db_up, needs_db_down, *needs_ups, needs_down = ctx.needs_input_grad[2:]
        others = [needs_dx, needs_db_up, *needs_ups]
        h = _between(zs, activation, glu) if needs_down else None
        dh, dw_down, db_down = row_gradients(
            (any(others), needs_down, needs_db_down),
            dy,
            h,
            w_down if any(others) else None,
            main_grads[-1:],
            span,
        )
        dx = db_up = None
        dws: list[Tensor | None] = [None] * len(ups)
        if dh is not None:
            dzs = _between_gradients(dh, zs, activation, glu)
            needs = [needs_dx, *needs_ups, needs_db_up, *[False] * (len(ups) - 1)]
            dx, *grads = column_gradients(needs, dzs, x, ups, [], main_grads[:-1], span, "none", False)
            dws, db_up = grads[: len(ups)], grads[len(ups)]
        return None, None, dx, db_up, db_down, *add_if_traced(main_grads, [*dws, dw_down])
