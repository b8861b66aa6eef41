"""Megatron's linear layers and vocabulary-parallel embedding on one rank's weights, computed by our ops.

An option of Megatron's that they do not support is an error that names the option.
"""

from __future__ import annotations

import copy
from importlib.util import find_spec
from typing import Any

import torch
from megatron.core.tensor_parallel import layers as theirs
from megatron.core.utils import get_tensor_model_parallel_group_if_none
from torch import Tensor, is_grad_enabled
from torch.distributed import ProcessGroup

from tpkernels import ops, tp_invariance
from tpkernels.interop.megatron_core.accumulation import AddToMainGrad, KeepForLater
from tpkernels.ops.inputs import apply
from tpkernels.ops.main_grad import accumulating
from tpkernels.ops.tensor_parallel.mappings import scatter_to_region

OP = "linear_with_grad_accumulation_and_async_allreduce"
DRAINING = "fused_weight_gradient_mlp_cuda"  # Megatron computes deferred gradients with it


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
    """Compute input weightᵀ + bias.

    gradient_accumulation_fusion: the weight's gradient is added to `weight.main_grad`
    allreduce_dgrad: the gradient of input is summed over the tensor group
    sequence_parallel: input is this rank's tokens (dimension 0), and is gathered; it takes precedence over
        allreduce_dgrad, as after Megatron's `set_model_to_sequence_parallel`
    grad_output_buffer: append the output's gradient to this list, and do not compute the weight's gradient
    wgrad_deferral_limit: must be 0, no limit: a layer decides in forward which gradients it defers
    async_grad_allreduce: has no effect, as in Megatron
    gtp_remat_size, output_dtype: arguments of later sources than 0.16; 1, and None or the dtype of input
    """
    require_whole_weight(OP, gtp_remat_size)
    require_dtype(OP, output_dtype, input)
    weight, main_grad = _fused(OP, weight, gradient_accumulation_fusion)
    if grad_output_buffer is not None:
        if wgrad_deferral_limit:
            raise NotImplementedError(
                f"{OP}: expected wgrad_deferral_limit 0 with a grad_output_buffer, got {wgrad_deferral_limit}"
            )
        if not gradient_accumulation_fusion:
            raise ValueError(f"{OP}: expected gradient_accumulation_fusion with a grad_output_buffer")
        if main_grad is not None:
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
    """Compute input weightᵀ + bias for a weight without gradient; the input is not saved.

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


def _fused(caller: str, weight: Tensor, fusion: bool) -> tuple[Tensor, Tensor | None]:
    """Return the weight, and the `main_grad` that backward adds to; None without the fusion or a gradient."""
    if not (fusion and weight.requires_grad and is_grad_enabled()):
        return weight, None
    if hasattr(weight, "__fsdp_param__"):  # Megatron-FSDP owns the `main_grad`
        raise NotImplementedError(
            f"{caller}: expected gradient_accumulation_fusion=False under Megatron-FSDP, got True: its "
            "main_grad does not exist before backward; turn the fusion off"
        )
    return accumulating(weight, caller)


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


class ColumnParallelLinear(theirs.ColumnParallelLinear):  # type: ignore[misc] # Megatron is not typed
    """Megatron's column-parallel layer with its parameters, initial weights and checkpoints, on our ops.

    Transfers overlap with products without CUDA_DEVICE_MAX_CONNECTIONS=1; `gradient_accumulation_fusion`
    needs no apex.
    """

    def __init__(self, input_size: int, output_size: int, *, config: Any, **options: Any) -> None:
        """options: the other arguments of Megatron's constructor, of any version"""
        # Megatron would find out after the last backward
        if config.defer_embedding_wgrad_compute and find_spec(DRAINING) is None:
            raise NotImplementedError(
                "ColumnParallelLinear: expected defer_embedding_wgrad_compute=False where apex is not "
                f"installed, got True: Megatron computes what it defers with apex's {DRAINING}"
            )
        unfused = copy.copy(config)  # Megatron refuses the fusion where apex is not installed
        unfused.gradient_accumulation_fusion = False
        super().__init__(input_size, output_size, config=unfused, **options)
        self.config = config
        self.gradient_accumulation_fusion = config.gradient_accumulation_fusion

    def _forward_impl(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gradient_accumulation_fusion: bool,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        grad_output_buffer: list[Tensor] | None,
        wgrad_deferral_limit: int | None,
        tp_group: ProcessGroup | None,
        gtp_remat_size: int = 1,
        output_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Compute the product for Megatron's `forward`, which gathers the output if needed.

        wgrad_deferral_limit: unused: gradients are kept for the inputs that `forward` has kept
        """
        require_supported(self)
        if not weight.requires_grad:
            return linear_with_frozen_weight(
                input,
                weight,
                bias,
                False,
                allreduce_dgrad,
                sequence_parallel,
                tp_group,
                output_dtype=output_dtype,
            )
        inputs = self.embedding_activation_buffer
        deferred = grad_output_buffer is not None and bool(inputs) and inputs[-1] is input
        return linear_with_grad_accumulation_and_async_allreduce(
            input,
            weight,
            bias,
            gradient_accumulation_fusion,
            allreduce_dgrad,
            sequence_parallel,
            grad_output_buffer if deferred else None,
            tp_group=tp_group,
            output_dtype=output_dtype,
        )


class RowParallelLinear(theirs.RowParallelLinear):  # type: ignore[misc] # Megatron is not typed
    """Megatron's row-parallel layer with its parameters, initial weights and checkpoints, on our ops.

    The product and its sum over ranks are one op. Each rank adds the bias to its tokens afterwards, so that
    its gradient is partial under sequence parallelism, as its attribute says.
    """

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return (output, output_bias).

        input_: (tokens, ..., input_size_per_partition), or input_size unless input_is_parallel
        """
        require_supported(self)
        name = type(self).__name__
        if self.explicit_expert_comm and not self.skip_bias_add:
            raise ValueError(
                f"{name}: expected skip_bias_add=True for an expert whose outputs the token dispatcher sums"
            )
        if not self.input_is_parallel and self.tp_group.size() > 1:
            input_ = scatter_to_region(input_, self.tp_group)
        if self.explicit_expert_comm or self.tp_group is None or self.tp_group.size() == 1:
            output = linear_with_grad_accumulation_and_async_allreduce(
                input_, self.weight, None, self.gradient_accumulation_fusion, False, False
            )
        else:
            weight, main_grad = _fused(name, self.weight, self.gradient_accumulation_fusion)
            split = self.sequence_parallel
            output = ops.row_linear(
                input_, weight, None, self.tp_group, sequence_parallel=split, main_grad=main_grad
            )
        if self.skip_bias_add:
            return output, self.bias
        return (output if self.bias is None else output + self.bias), None

    def backward_dw(self) -> None:
        """Do nothing: backward computes the weight's gradient, also with `delay_wgrad_compute`."""


class VocabParallelEmbedding(theirs.VocabParallelEmbedding):  # type: ignore[misc] # Megatron is not typed
    """Megatron's embedding with its parameters, initial weights and checkpoints, on our ops.

    An id outside the vocabulary is an error; Megatron's layer returns zeros for it.
    """

    def forward(self, input_: Tensor) -> Tensor:
        """Look up the row of each id.

        input_: (batch, sequence) ids, the same on all ranks
        returns: (batch, sequence, features), or this rank's (sequence, batch, features) if
            reduce_scatter_embeddings
        """
        require_no_invariance("VocabParallelEmbedding")
        require_whole_weight("VocabParallelEmbedding", getattr(self, "gtp_remat_size", 1))
        scattered = self.reduce_scatter_embeddings
        ids = input_.transpose(0, 1).contiguous() if scattered else input_
        split = scattered and self.tp_group.size() > 1
        return ops.vocab_embedding(ids, self.weight, self.tp_group, sequence_parallel=split)


def require_supported(layer: Any) -> None:
    """Raise if a layer's config has an unsupported option; called in each forward, because it may change."""
    name, config = type(layer).__name__, layer.config
    require_no_invariance(name)
    offloading = config._cpu_offloading_context
    if offloading is not None and offloading.inside_context:
        raise NotImplementedError(
            f"{name}: expected cpu_offloading=False, got True: Transformer Engine offloads what its own "
            "layers keep"
        )
    require_whole_weight(name, getattr(layer, "gtp_remat_size", 1))


def require_whole_weight(caller: str, gtp_remat_size: int) -> None:
    """Raise if Megatron would gather weights for each use."""
    if gtp_remat_size > 1:
        raise NotImplementedError(
            f"{caller}: expected gtp_weight_remat_size 1, got {gtp_remat_size}: weights are not gathered for "
            "each use"
        )


def require_dtype(caller: str, output_dtype: torch.dtype | None, x: Tensor) -> None:
    """Raise unless the output's dtype is the input's."""
    if output_dtype not in (None, x.dtype):
        raise NotImplementedError(
            f"{caller}: expected no output_dtype, or that of the input, {x.dtype}, got {output_dtype}"
        )


def require_no_invariance(caller: str) -> None:
    """Raise if TP-invariance is on."""
    if segments := tp_invariance.default.segments:
        raise NotImplementedError(
            f"{caller}: expected no TP-invariance inside Megatron, got {segments} segments: Megatron's "
            f"own attention, losses and optimizer depend on the tensor-parallel size; "
            f"unset {tp_invariance.VARIABLE}"
        )
