"""The gated unit f(x Wgᵀ) * (x Wuᵀ) as one differentiable operator.

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

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn import functional

from tpkernels.dispatch import torch_steps
from tpkernels.dispatch.steps import Steps, steps_on
from tpkernels.kernels.activations import GATE_OF, Glu, act_grad_ref, act_ref, require_glu
from tpkernels.ops import registered
from tpkernels.ops.inputs import (
    any_requires_grad,
    autocast,
    casting,
    check_linear,
    compiling,
    features_of,
    like_tokens,
    tokens_of,
)
from tpkernels.ops.region import follow_autocast

Grads = tuple[Tensor | None, Tensor | None, Tensor | None]


def swiglu(x: Tensor, w_gate: Tensor, w_up: Tensor, *, kind: Glu = "swiglu") -> Tensor:
    """silu(x w_gateᵀ) * (x w_upᵀ), or with gelu for silu.

    x: (..., in_features)
    w_gate, w_up: (out_features, in_features)
    kind: swiglu, geglu or geglu_tanh
    returns: (..., out_features)
    """
    require_glu("swiglu", kind)
    if casting(x):
        x, w_gate, w_up = cast("tuple[Tensor, Tensor, Tensor]", autocast(x, w_gate, w_up))
    check_gated("swiglu", x, w_gate, w_up)
    keep_gu = any_requires_grad(x, w_gate, w_up)
    arguments = (tokens_of(x), w_gate, w_up, kind, keep_gu)
    h: Tensor
    if compiling("swiglu"):
        h = registered.glu(*arguments)[0]
    else:
        h = _Glu.apply(*arguments)  # type: ignore[no-untyped-call]
    return like_tokens(h, x)


def check_gated(op: str, x: Tensor, w_gate: Tensor, w_up: Tensor) -> None:
    check_linear(op, x, features_of(op, x), w_gate, None, ("w_gate", ""))
    check_linear(op, x, features_of(op, x), w_up, None, ("w_up", ""))
    if w_gate.shape != w_up.shape:
        raise ValueError(
            f"{op}: expected w_gate and w_up of one shape, got {tuple(w_gate.shape)} and {tuple(w_up.shape)}"
        )


class _Glu(torch.autograd.Function):
    """The eager way, straight to the kernels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w_gate: Tensor, w_up: Tensor, kind: Glu, keep_gu: bool) -> Tensor:
        outputs = steps_on(x.device).glu(x, w_gate, w_up, kind, keep_gu)
        _save(ctx, (x, w_gate, w_up, kind, keep_gu), outputs)
        return outputs[0]

    @staticmethod
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor | None, ...]:
        return *_gradients(ctx, steps_on(dh.device), dh), None, None


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
    x, w_gate, w_up, kind, _ = inputs
    ctx.save_for_backward(x, w_gate, w_up, *output[1:])
    ctx.gate = GATE_OF[cast("Glu", kind)]


def _gradients(ctx: Any, steps: Steps, dh: Tensor) -> Grads:
    x, w_gate, w_up, g, u = ctx.saved_tensors
    if torch.is_grad_enabled():
        steps, g, u = torch_steps, *gate_and_up(x, w_gate, w_up)
    dg, du = act_grad_ref(dh * u, g, ctx.gate), dh * act_ref(g, ctx.gate)
    return input_and_weight_gradients(steps, ctx.needs_input_grad, x, w_gate, w_up, dg, du)


def gate_and_up(x: Tensor, w_gate: Tensor, w_up: Tensor) -> tuple[Tensor, Tensor]:
    """g and u again, for gradients that are to be differentiated: what was saved of them is constant."""
    return functional.linear(x, w_gate), functional.linear(x, w_up)


def input_and_weight_gradients(
    steps: Steps,
    needs: tuple[bool, ...],
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    dg: Tensor,
    du: Tensor,
) -> Grads:
    """(dx, dw_gate, dw_up) of the two products that share x, as far as `needs` asks for them."""
    return (
        steps.dgrad(dg, w_gate) + steps.dgrad(du, w_up) if needs[0] else None,
        steps.wgrad(dg, x) if needs[1] else None,
        steps.wgrad(du, x) if needs[2] else None,
    )


def _registered_backward(
    ctx: FunctionCtx, dh: Tensor, dg: Tensor | None, du: Tensor | None
) -> tuple[Tensor | None, ...]:
    # nobody sees g and u, so their gradients say nothing
    return *_gradients(ctx, cast("Steps", registered), dh), None, None


registered.glu.register_autograd(_registered_backward, setup_context=_save)
follow_autocast(registered.glu)
