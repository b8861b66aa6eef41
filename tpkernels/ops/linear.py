"""act(x Wᵀ + b) as one differentiable operator.

T tokens, K in_features, N out_features:

    x    (T, K)      weight  (N, K)      bias  (N,)

    forward   z = x weightᵀ + bias,  y = act(z)       one kernel
    dz        dy * act'(z)
    dgrad     dx = dz weight
    wgrad     dw = dzᵀ x
    dbias     db = dz.sum(0)

Saved for backward: x, weight, and z where there is an activation; what no gradient needs is not saved. As a
second output z stays connected with the inputs: second derivatives come back to backward as dz.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from tpkernels.dispatch import torch_steps
from tpkernels.dispatch.steps import Steps, steps_on
from tpkernels.kernels.activations import Activation, act_grad_ref, require_activation
from tpkernels.ops import registered
from tpkernels.ops.inputs import (
    any_requires_grad,
    as_dtype,
    autocast,
    casting,
    check_linear,
    compiling,
    features_of,
    in_forward_mode,
    like_tokens,
    tokens_of,
)
from tpkernels.ops.region import follow_autocast

Grads = tuple[Tensor | None, Tensor | None, Tensor | None]


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: Activation | None = None
) -> Tensor:
    """act(x weightᵀ + bias), as `F.linear` and an activation after it.

    x: (..., in_features)
    weight: (out_features, in_features)
    bias: (out_features,)
    activation: gelu, gelu_tanh, silu, relu, relu2 or None
    returns: (..., out_features)
    """
    activation = activation or "none"
    require_activation("linear", activation)
    if casting(x):
        x, weight, bias = cast("tuple[Tensor, Tensor, Tensor | None]", autocast(x, weight, bias))
    check_linear("linear", x, features_of("linear", x), weight, bias, ("weight", "bias"))
    needs = any_requires_grad(x, weight, bias)
    y: Tensor
    if compiling("linear"):
        y = registered.linear(tokens_of(x), weight, bias, activation, needs)[0]
    elif not needs and not in_forward_mode():  # `apply` takes longer than a tiny product
        y = steps_on(x.device).linear(tokens_of(x), weight, bias, activation, False)[0]
    elif activation == "none":  # `apply` takes its time over each argument
        y = _Linear.apply(tokens_of(x), weight, bias)  # type: ignore[no-untyped-call]
    else:
        y, _ = _Linear.apply(tokens_of(x), weight, bias, activation)  # type: ignore[no-untyped-call]
    return like_tokens(y, x)


class _Linear(torch.autograd.Function):
    """The eager way, straight to the kernels."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: Activation = "none",
    ) -> Tensor | tuple[Tensor, Tensor]:
        y, z = steps_on(x.device).linear(x, weight, bias, activation, activation != "none")
        _save(ctx, x, weight, z, activation)
        return y if z is None else (y, z)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dz: Tensor | None = None) -> tuple[Tensor | None, ...]:
        return *_gradients(ctx, None, dy, dz), None


def _save(ctx: Any, x: Tensor, weight: Tensor, z: Tensor | None, activation: Activation) -> None:
    needs = ctx.needs_input_grad
    ctx.save_for_backward(x if needs[1] else None, weight if needs[0] else None, z)
    ctx.activation = activation
    if z is not None:
        ctx.set_materialize_grads(False)  # z has a gradient in second derivatives only


def _gradients(ctx: Any, given: Steps | None, dy: Tensor | None, dz_too: Tensor | None) -> Grads:
    """given: who computes, by default whoever does where dy lies; dz_too: what a second derivative adds"""
    x, weight, z = ctx.saved_tensors
    needs_dx, needs_dw, needs_db, *_ = ctx.needs_input_grad
    if dy is None:
        if dz_too is None:
            return None, None, None
        dy = torch.zeros_like(dz_too)
    # to be differentiated again: by torch, whose products autograd follows
    steps = torch_steps if torch.is_grad_enabled() else given or steps_on(dy.device)
    dz = act_grad_ref(dy, z, ctx.activation)
    if dz_too is not None:
        dz = dz + dz_too
    return (
        steps.dgrad(dz, weight) if needs_dx else None,
        steps.wgrad(dz, x) if needs_dw else None,
        as_dtype(steps.bias_grad(dz), dz.dtype) if needs_db else None,
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _, activation, _ = inputs
    _save(ctx, x, weight, output[1], activation)


def _registered_backward(ctx: Any, dy: Tensor | None, dz: Tensor | None) -> tuple[Tensor | None, ...]:
    if ctx.activation == "none":
        dz = None  # an empty tensor stands for z
    return *_gradients(ctx, cast("Steps", registered), dy, dz), None, None


registered.linear.register_autograd(_registered_backward, setup_context=_setup)
follow_autocast(registered.linear)
