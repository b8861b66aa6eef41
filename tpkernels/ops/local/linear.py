"""A linear layer, x Wᵀ + b, as one differentiable operator; with an activation it is a unit: see `local.mlp`.

T tokens, K in_features, N out_features:

    x    (T, K)      weight  (N, K)      bias  (N,)

    forward   y = x weightᵀ + bias
    dgrad     dx = dy weight
    wgrad     dw = dyᵀ x
    dbias     db = dy.sum(0)

Saved for backward: x and weight, unless no gradient needs them. Where torch computes, these are torch's own
operators, which save the same, and whose products have the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tpkernels.dispatch import primitives
from tpkernels.kernels.activations import Activation, act_ref, require_activation
from tpkernels.kernels.recipe import Recipe
from tpkernels.ops import spmd_rules
from tpkernels.ops.inputs import (
    Context,
    as_dtype,
    autocast,
    check_linear,
    computed,
    features_of,
    is_casting,
    is_torchs,
    like_tokens,
    quick_linear,
    tokens_of,
)
from tpkernels.ops.local.mlp import unit_and_down
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
    if is_casting(x):  # each time: torch would keep what it has cast until the region ends
        x, weight, bias = autocast(x, weight, bias)
    check_linear("linear", x, features_of("linear", x), weight, bias, ("weight", "bias"))
    tokens = tokens_of(x)
    if quantize is not None:
        fp8 = strategy_of("linear", ALONE, quantize, x)
        (y,) = column("linear", tokens, [weight], [bias], [None], ALONE, fp8, activation or "none")
    elif is_torchs(x) and activation != "relu":  # of which torch saves y, whose zeros are no gradients of NaN
        z = functional.linear(tokens, weight, bias)
        y = z if activation is None else act_ref(z, activation)
    elif activation is None or activation == "none":  # also over each argument
        y = computed(_Linear, tokens, weight, bias)
    else:
        y = unit_and_down(activation, tokens, None, weight, bias, None, None)
    return like_tokens(y, x)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        needs_dx, needs_dw, _ = ctx.needs_input_grad[:3]
        ctx.save_for_backward(x if needs_dw else None, weight if needs_dx else None)
        return primitives.linear(x, weight, bias, "none", False)[0]

    @staticmethod
    def spmd_typecheck(*, x: Tensor, weight: Tensor, bias: Tensor | None) -> spmd_rules.Typed:
        return spmd_rules.einsum("tk,nk,n->tn", x, weight, bias)

    @staticmethod
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_dx, needs_dw, needs_db = ctx.needs_input_grad
        return (
            primitives.dgrad(dy, weight) if needs_dx else None,
            primitives.wgrad(dy, x) if needs_dw else None,
            as_dtype(primitives.bias_grad(dy), dy.dtype) if needs_db else None,
        )
