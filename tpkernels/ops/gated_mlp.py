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

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from tpkernels.dispatch import torch_steps
from tpkernels.dispatch.steps import Steps, steps_on
from tpkernels.kernels.activations import Glu, require_glu
from tpkernels.ops import registered
from tpkernels.ops.inputs import (
    any_requires_grad,
    as_dtype,
    autocast,
    casting,
    check_linear,
    compiling,
    like_tokens,
    tokens_of,
)
from tpkernels.ops.region import follow_autocast
from tpkernels.ops.swiglu import check_gated, gate_and_up, input_and_weight_gradients


def gated_mlp(
    x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, b_down: Tensor | None, *, kind: Glu
) -> Tensor:
    """(f(x w_gateᵀ) * (x w_upᵀ)) w_downᵀ + b_down, f being the activation of `kind`."""
    require_glu("mlp", kind)
    if casting(x):
        x, w_gate, w_up, w_down, b_down = cast(
            "tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]",
            autocast(x, w_gate, w_up, w_down, b_down),
        )
    check_gated("mlp", x, w_gate, w_up)
    check_linear("mlp", x, w_up.shape[0], w_down, b_down, ("w_down", "b_down"))
    keep_gu = any_requires_grad(x, w_gate, w_up, w_down, b_down)
    arguments = (tokens_of(x), w_gate, w_up, w_down, b_down, kind, keep_gu)
    y: Tensor
    if compiling("mlp"):
        y = registered_gated_mlp(*arguments)[0]
    else:
        y = _GatedMlp.apply(*arguments)  # type: ignore[no-untyped-call]
    return like_tokens(y, x)


def _forward(
    steps: Steps,
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    b_down: Tensor | None,
    kind: Glu,
    keep_gu: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    h, g, u = steps.glu(x, w_gate, w_up, kind, keep_gu)
    y, _ = steps.linear(h, w_down, b_down, "none", False)
    return y, g, u


class _GatedMlp(torch.autograd.Function):
    """The eager way, straight to the kernels."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        output = _forward(steps_on(inputs[0].device), *inputs)
        _save(ctx, inputs, output)
        return output[0]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return *_gradients(ctx, steps_on(dy.device), dy), None, None


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
    x, w_gate, w_up, w_down, b_down, kind, _ = inputs
    ctx.save_for_backward(x, w_gate, w_up, w_down, *output[1:])
    ctx.kind = kind
    ctx.bias_dtype = None if b_down is None else b_down.dtype


def _gradients(ctx: Any, steps: Steps, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, w_gate, w_up, w_down, g, u = ctx.saved_tensors
    needs = ctx.needs_input_grad
    if torch.is_grad_enabled():
        steps, g, u = torch_steps, *gate_and_up(x, w_gate, w_up)
    dx = dw_gate = dw_up = dw_down = None
    if any(needs[:4]):
        dg, du, h = steps.dglu(dy, w_down, g, u, ctx.kind)
        dx, dw_gate, dw_up = input_and_weight_gradients(steps, needs, x, w_gate, w_up, dg, du)
        dw_down = steps.wgrad(dy, h) if needs[3] else None
    db_down = as_dtype(steps.bias_grad(dy), ctx.bias_dtype) if needs[4] else None
    return dx, dw_gate, dw_up, dw_down, db_down


@torch.library.custom_op("tpkernels::gated_mlp", mutates_args=())
def registered_gated_mlp(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    b_down: Tensor | None,
    kind: str,
    keep_gu: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    steps = steps_on(x.device)
    y, g, u = _forward(steps, x, w_gate, w_up, w_down, b_down, cast("Glu", kind), keep_gu)
    return y, registered.or_empty(g, y), registered.or_empty(u, y)


@registered_gated_mlp.register_fake
def _(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    b_down: Tensor | None,
    kind: str,
    keep_gu: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    y = x.new_empty(x.shape[0], w_down.shape[0])
    between = (x.shape[0], w_up.shape[0]) if keep_gu else (0,)
    return y, x.new_empty(between), x.new_empty(between)


def _registered_backward(
    ctx: FunctionCtx, dy: Tensor, dg: Tensor | None, du: Tensor | None
) -> tuple[Tensor | None, ...]:
    # nobody sees g and u, so their gradients say nothing
    return *_gradients(ctx, cast("Steps", registered), dy), None, None


registered_gated_mlp.register_autograd(_registered_backward, setup_context=_save)
follow_autocast(registered_gated_mlp)
