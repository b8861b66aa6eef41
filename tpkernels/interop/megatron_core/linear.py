"""Megatron's functions of a linear layer on one rank's weight, with its arguments, computed by our ops."""

from __future__ import annotations

import torch
from megatron.core.utils import get_tensor_model_parallel_group_if_none
from torch import Tensor, is_grad_enabled
from torch.distributed import ProcessGroup

from tpkernels import ops
from tpkernels.interop.megatron_core.accumulation import AddToMainGrad, KeepForLater
from tpkernels.interop.megatron_core.limits import require_dtype, require_own_main_grad, require_whole_weight
from tpkernels.ops.inputs import apply
from tpkernels.ops.main_grad import accumulating

OP = "linear_with_grad_accumulation_and_async_allreduce"


def linear_with_grad_accumulation_and_async_allreduce(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gradient_accumulation_fusion: bool,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    grad_output_buffer: list[Tensor] | None = None,
    wgrad_deferral_limit: int | None = 0,
    async_grad_allreduce: bool | None = None,
    tp_group: ProcessGroup | None = None,
    gtp_remat_size: int = 1,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """input weightᵀ + bias.

    gradient_accumulation_fusion: the weight's gradient is added to `weight.main_grad`
    allreduce_dgrad: the gradient of input is summed over the tensor group
    sequence_parallel: input is this rank's tokens (dimension 0), and is gathered; given both, as after
        Megatron's `set_model_to_sequence_parallel`, this one counts
    grad_output_buffer: the weight's gradient is not computed, but the output's is appended to this list
    wgrad_deferral_limit: must be 0, no limit: a layer decides in forward what it defers
    async_grad_allreduce: has no effect, as in Megatron
    gtp_remat_size, output_dtype: of later sources than 0.16; 1, and None or the dtype of input
    """
    require_whole_weight(OP, gtp_remat_size)
    require_dtype(OP, output_dtype, input)
    fused = gradient_accumulation_fusion and weight.requires_grad and is_grad_enabled()
    main_grad = None
    if fused:
        require_own_main_grad(OP, weight)
        weight, main_grad = accumulating(weight, OP)
    if grad_output_buffer is not None:
        if wgrad_deferral_limit:
            raise NotImplementedError(
                f"{OP}: expected wgrad_deferral_limit 0 with a grad_output_buffer, got {wgrad_deferral_limit}"
            )
        if not gradient_accumulation_fusion:
            raise ValueError(f"{OP}: expected gradient_accumulation_fusion with a grad_output_buffer")
        if fused:
            constant = weight.detach()
            y = _product(input, constant, bias, None, allreduce_dgrad, sequence_parallel, tp_group)
            kept: Tensor = apply(KeepForLater, y, weight, grad_output_buffer)
            return kept
    return _product(input, weight, bias, main_grad, allreduce_dgrad, sequence_parallel, tp_group)


def linear_with_frozen_weight(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gradient_accumulation_fusion: bool,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: ProcessGroup | None,
    grad_output_buffer: list[Tensor] | None = None,
    wgrad_deferral_limit: None = None,
    async_grad_allreduce: bool | None = None,
    gtp_remat_size: int = 1,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """input weightᵀ + bias, of whose backward the weight gets no gradient; input is not saved for it.

    gradient_accumulation_fusion, async_grad_allreduce: have no effect, as in Megatron
    gtp_remat_size, output_dtype: as in `linear_with_grad_accumulation_and_async_allreduce`
    """
    require_whole_weight("linear_with_frozen_weight", gtp_remat_size)
    require_dtype("linear_with_frozen_weight", output_dtype, input)
    if grad_output_buffer is not None or wgrad_deferral_limit is not None:
        raise ValueError(
            "linear_with_frozen_weight: expected no grad_output_buffer and no wgrad_deferral_limit: a frozen "
            "weight has no gradient to be deferred"
        )
    return _product(input, weight.detach(), bias, None, allreduce_dgrad, sequence_parallel, tp_group)


def _product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    main_grad: Tensor | None,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    group: ProcessGroup | None,
) -> Tensor:
    if allreduce_dgrad or sequence_parallel:
        group = get_tensor_model_parallel_group_if_none(group)
        if group is None:
            raise ValueError(f"{OP}: expected a tp_group, or Megatron's parallel state to be initialized")
        if group.size() > 1:
            return ops.column_linear(
                x, weight, bias, group, sequence_parallel=sequence_parallel, main_grad=main_grad
            )
    if main_grad is None:
        return ops.linear(x, weight, bias)
    y = ops.linear(x, weight.detach(), bias)
    added: Tensor = apply(AddToMainGrad, y, weight, x.detach(), main_grad)
    return added
