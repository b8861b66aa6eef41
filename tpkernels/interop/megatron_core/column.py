"""Megatron's column-parallel layer, computed by our ops."""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core.tensor_parallel import layers as theirs
from torch import Tensor
from torch.distributed import ProcessGroup

from tpkernels.interop.megatron_core import linear
from tpkernels.interop.megatron_core.limits import require_draining, require_supported


class ColumnParallelLinear(theirs.ColumnParallelLinear):  # type: ignore[misc] # Megatron is not typed
    """Megatron's, with its parameters, initial weights, attributes and checkpoints.

    Transfers overlap with products without CUDA_DEVICE_MAX_CONNECTIONS=1, and `gradient_accumulation_fusion`
    does without apex.
    """

    def __init__(self, input_size: int, output_size: int, *, config: Any, **options: Any) -> None:
        """options: those of Megatron's constructor, which each version has more of"""
        require_draining("ColumnParallelLinear", config)
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
        """Megatron's `forward` calls it, and gathers the output where that is asked for.

        wgrad_deferral_limit: `forward` has kept as many inputs; outputs' gradients are kept for these
        """
        require_supported(self)
        if not weight.requires_grad:
            return linear.linear_with_frozen_weight(
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
        return linear.linear_with_grad_accumulation_and_async_allreduce(
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
