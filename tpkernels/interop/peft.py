"""peft's LoRA on a model that `parallelize` has split.

    split along out_features    A is replicated, B is split as the layer is
    split along in_features     A is split as the layer is, B is replicated

Tensor-parallel ranks exchange r features, r being the adapter's rank, in forward or backward.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from peft import LoraConfig  # type: ignore[import-not-found]
from peft.tuners import lora  # type: ignore[import-not-found]
from torch import nn

from tpkernels.interop.parallelize.changes import module_change, split_with_shards
from tpkernels.interop.parallelize.hf_modules import ColumnLinear, Cut, RowLinear, SplitLayer
from tpkernels.interop.parallelize.lora import refuse_what_differs, split_dropouts
from tpkernels.interop.parallelize.plan import Split
from tpkernels.interop.parallelize.saving import refuse_to_save_shards
from tpkernels.interop.parallelize.saving import save_full_weights as save_full_weights
from tpkernels.layers.attributes import Attributes
from tpkernels.layers.parallel_module import ParallelModule
from tpkernels.ops.replicas import copy_first_rank_


def on_shards(config: LoraConfig) -> LoraConfig:
    """Return the same configuration, adapted for `get_peft_model` on a model that is split already.

    Call `save_full_weights` with the PeftModel then: until it, `save_pretrained` is refused.
    """
    config._register_custom_module({ParallelModule: ShardedLora})
    config.save_pretrained = refuse_to_save_shards
    return config


class ShardedLora(lora.Linear):  # type: ignore[misc]  # untyped where peft is not installed
    """peft's LoRA of a linear layer, with factors split as the layer is."""

    def __init__(self, base_layer: nn.Module, adapter_name: str, config: LoraConfig, **kwargs: Any) -> None:
        inner = base_layer.get_base_layer() if isinstance(base_layer, lora.LoraLayer) else base_layer
        target = _require_linear(inner)
        config = copy(config)
        config.fan_in_fan_out = target.is_conv1d  # of the weight's layout
        super().__init__(base_layer, adapter_name, config, **kwargs)

    def _get_in_out_features(self, module: SplitLayer) -> tuple[int, int]:
        """Return the full layer's features: factors are drawn as for the unsharded model, then split."""
        return module.in_features, module.out_features

    def update_layer(
        self, adapter_name: str, r: int, lora_alpha: int, config: LoraConfig, **kwargs: Any
    ) -> None:
        """Add an adapter with the first rank's factors on all ranks."""
        base = self.get_base_layer()
        variant = self.resolve_lora_variant(config=config)
        refuse_what_differs(
            str(kwargs.get("target_name") or type(base).__name__),
            variant="" if variant is None else type(variant).__name__,
            initialization=config.init_lora_weights,
        )
        super().update_layer(adapter_name, r, lora_alpha, config=config, **kwargs)
        factors = self.lora_A[adapter_name], self.lora_B[adapter_name]
        copy_first_rank_([p.detach() for factor in factors for p in factor.parameters()], base.world.group)
        if isinstance(base, ColumnLinear):
            stacked = Attributes.of(base.weight).partition_stride
            self.lora_B[adapter_name] = _split_factor(factors[1], base, Split("column", stacked=stacked))
        else:
            self.lora_A[adapter_name] = _split_factor(factors[0], base, Split("row"))
            split_dropouts(self, Cut.along(-1, (factors[0].in_features,), base.world))


@torch.no_grad()
def _split_factor(full: nn.Linear, base: SplitLayer, entry: Split) -> nn.Module:
    """Return A or B with this rank's shards."""
    return split_with_shards(module_change("", full, entry, base.world), base.world.group, {})


def _require_linear(target: nn.Module) -> SplitLayer:
    if type(target) not in (ColumnLinear, RowLinear):
        raise TypeError(
            f"LoRA: expected linear layers that parallelize has split as column or row, got "
            f"{type(target).__name__}; leave it out of target_modules, or apply LoRA before parallelize"
        )
    assert isinstance(target, SplitLayer)
    if target.tokens is not None or target.stacks or target.split is not None:
        raise ValueError(
            "LoRA: expected a layer without sequence_parallel and padded heads, whose stacked weights have "
            f"one size, got {target}; apply LoRA before parallelize"
        )
    return target
