"""Row-parallel linear in fp8. See `ops.tensor_parallel.row_linear` and `span`.

R ranks, T tokens, K in_features, N out_features; ^ marks rows in fp8:

    forward   y_shard  = reduce_scatter(x̂_shard ŵ_shardᵀ) + bias      sums are in 16 bits
    dgrad     dx_shard = all_gather(quantize(dy_shard)) w̃_shard       rows as they arrive
    wgrad     dw_shard = dyᵀ x_shard                                  of d̂y where dy was gathered
    dbias     db       = dy.sum(0)                                    likewise

The scales of x_shard and w_shard are of this rank's features: other numbers of ranks round otherwise.

The autograd function is that of the 16-bit op.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tpkernels.comm.calls import all_or_fail
from tpkernels.dispatch.operators import Operator
from tpkernels.kernels.scaled import Scaled
from tpkernels.ops.main_grad import MainGrads
from tpkernels.ops.quantized.span import Span, product_into, rounded
from tpkernels.ops.tensor_parallel.operands import Gradients, bias_gradient, row_gradient_shapes, row_shape
from tpkernels.ops.tensor_parallel.parallel import compare_in_backward


@all_or_fail
def _row_forward(x: Tensor, weight: Tensor, bias: Tensor | None, span: Span) -> Tensor:
    return row_product(span.activations(x), weight, bias, span, x.dtype)


def row_product(x: Scaled, weight: Tensor, bias: Tensor | None, span: Span, dtype: torch.dtype) -> Tensor:
    pairs = [(x, span.rows(weight))]
    return span.sum_of_products("row_linear", pairs, dtype, bias=bias).wait()


row_forward = Operator("quantized_row_linear", _row_forward, row_shape)


@all_or_fail
def _row_gradients(
    needs: Sequence[bool],
    dy_shard: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    main_grads: MainGrads,
    span: Span,
) -> Gradients:
    """dx, dw, db. x, weight: None where dw, dx are not needed"""
    op, (into,) = "row_linear backward", main_grads
    was_gathered = span.token_shards > 1
    if was_gathered and span.group is not None:
        compare_in_backward(op, span.group, needs)
    dx, dy = None, dy_shard
    if weight is not None or was_gathered:
        own = span.gradients(dy_shard)
        gathering = span.gather(op, "dy", own, features=0 if weight is None else weight.shape[1])
        if weight is not None:
            columns = span.columns(weight)

            def multiply(chunk: Scaled, out: list[Tensor]) -> None:
                product_into(out, chunk, columns, None, "none", False)

            (dx,) = span.rowwise(gathering, own, [weight.shape[1]], dy_shard.dtype, multiply)
        if was_gathered:
            words = gathering.wait()  # also if nobody asks for it: the call ends for all ranks alike
            if x is not None or needs[2]:
                dy = rounded(own.with_words(words), dy_shard.dtype)
    dw = None if x is None else span.weight_gradient(dy, x, into)
    return dx, dw, bias_gradient(dy) if needs[2] else None


row_gradients = Operator("quantized_row_linear_backward", _row_gradients, row_gradient_shapes)
