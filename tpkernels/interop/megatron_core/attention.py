"""Megatron's attention, whose learnable softmax offsets are marked as a shard of the heads.

Megatron's `sharded_state_dict` names the axis, and its parameter has no mark: gradient norms, checkpoints and
comparisons of replicas would take each rank's offsets for a copy.
"""

from __future__ import annotations

from typing import Any

from megatron.core.transformer import dot_product_attention as theirs
from torch import Tensor

from tpkernels.layers.attributes import set_tensor_model_parallel_attributes


class DotProductAttention(theirs.DotProductAttention):  # type: ignore[misc] # Megatron is not typed
    """Megatron's own, with its constructor."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        offset: Tensor | None = self._parameters.get("softmax_offset")  # absent in older sources
        if offset is not None:
            set_tensor_model_parallel_attributes(offset, True, 0, 1)
