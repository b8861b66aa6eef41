"""A linear layer with an activation, act(x Wᵀ + b), as one differentiable operator.

T tokens, K in_features, N out_features:

    x    (T, K)      weight  (N, K)      bias  (N,)

    forward   z = x weightᵀ + bias,  y = act(z)       one kernel
    dz        dy * act'(z)
    dgrad     dx = dz weight
    wgrad     dw = dzᵀ x
    dbias     db = dz.sum(0)

Saved for backward: x, weight, and z where there is an activation; what no gradient needs is not saved. As a
second output z stays connected with the inputs: second derivatives come back to backward as dz. Where torch
computes, these are torch's own operators, which save the same, and whose products have the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tpkernels.dispatch import primitives
from tpkernels.kernels.activations import Activation, act_grad_ref, act_ref, require_activation
from tpkernels.kernels.recipe import Recipe
from tpkernels.ops import spmd_rules
from tpkernels.ops.inputs import (
    Context,
    as_dtype,
    autocast,
    check_linear,
    computed,
    connected,
    features_of,
    is_casting,
    is_torchs,
    like_tokens,
    quick_linear,
    tokens_of,
)
from tpkernels.ops.tensor_parallel.column_linear import column
from tpkernels.ops.tensor_parallel.parallel import ALONE, strategy_of


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    *,
    quantize: Recipe | None = None,
) -> Tensor:
    """Compute act(x weightᵀ + bias), as `F.linear` and an activation after it.

    x: (..., in_features)
    weight: (out_features, in_features)
    bias: (out_features,)
    activation: gelu, gelu_tanh, silu, relu, relu2 or None
    quantize: compute it in fp8
    returns: (..., out_features)
    """
    if activation is not None:
        require_activation("linear", activation)
    elif quantize is None and is_torchs(x) and (y := quick_linear()(x, weight, bias)) is not None:
        return y
    if (
        quantize is None
        and is_torchs(x)
        and activation != "relu"  # of which torch saves the result, and its zeros are no gradients of NaN
        # what torch takes and we refuse: vectors, integers, other devices, biases to broadcast
        and x.dim() > 0
        and weight.dim() == 2
        and x.is_floating_point()
        and weight.is_cpu
        and (bias is None or (bias.dim() == 1 and bias.numel() == weight.size(0)))
    ):
        if is_casting(x):  # each time: torch would keep what it has cast until the region ends
            x, weight, bias = autocast(x, weight, bias)
        try:
            z = functional.linear(tokens_of(x), weight, bias)
        except RuntimeError:
            check_linear("linear", x, x.shape[-1], weight, bias, ("weight", "bias"))  # in our words
            raise
        return like_tokens(z if activation is None else act_ref(z, activation), x)
    if is_casting(x):
        x, weight, bias = autocast(x, weight, bias)
    check_linear("linear", x, features_of("linear", x), weight, bias, ("weight", "bias"))
    tokens = tokens_of(x)
    if quantize is not None:
        fp8 = strategy_of("linear", ALONE, quantize, x)
        (y,) = column("linear", tokens, [weight], [bias], [None], ALONE, fp8, activation or "none")
        return like_tokens(y, x)
    if activation is None or activation == "none":  # also over each argument
        y = computed(_Linear, tokens, weight, bias)
    else:
        y, _ = computed(_Linear, tokens, weight, bias, activation)
    return like_tokens(y, x)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: Activation = "none",
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        y, z = primitives.linear(
            x, weight, bias, activation, activation != "none" and any(ctx.needs_input_grad)
        )
        needs_dx, needs_dw, *_ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_dw else None, weight if needs_dx else None, z)
        ctx.activation = activation
        if activation == "none":
            return y
        ctx.set_materialize_grads(False)  # z has a gradient in second derivatives only
        return y, connected(z)

    @staticmethod
    def spmd_typecheck(
        *, x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation = "none"
    ) -> spmd_rules.Typed:
        y = spmd_rules.einsum("tk,nk,n->tn", x, weight, bias)
        return y if activation == "none" else (y, y)

    @staticmethod
    def backward(ctx: Context, dy: Tensor | None, dz_too: Tensor | None = None) -> tuple[Tensor | None, ...]:
        """dz_too: the gradient of z, which only a second derivative has"""
        x, weight, z = ctx.saved_tensors
        needs_dx, needs_dw, needs_db, *_ = ctx.needs_input_grad
        if dy is None:
            if dz_too is None:
                return None, None, None, None
            dy = torch.zeros_like(dz_too)
        dz = dy if z is None else act_grad_ref(dy, z, ctx.activation)
        if dz_too is not None:
            dz = dz + dz_too
        return (
            primitives.dgrad(dz, weight) if needs_dx else None,
            primitives.wgrad(dz, x) if needs_dw else None,
            as_dtype(primitives.bias_grad(dz), dz.dtype) if needs_db else None,
            None,
        )
