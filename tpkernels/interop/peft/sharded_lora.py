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
from torch import Tensor, nn

from tpkernels.groups.sizes import ranges_of
from tpkernels.interop.parallelize.hf_modules import ColumnConv1D, ColumnLinear, Cut, RowConv1D, RowLinear
from tpkernels.interop.parallelize.lora import refuse_what_differs, split_dropouts
from tpkernels.layers.attributes import Attributes
from tpkernels.layers.linear import ColumnParallelLinear, RowParallelLinear
from tpkernels.layers.parallel_module import ParallelModule
from tpkernels.ops.replicas import copy_first_rank_

_SPLIT_OUT, _SPLIT_IN = (ColumnLinear, ColumnConv1D), (RowLinear, RowConv1D)


def on_shards(config: LoraConfig) -> LoraConfig:
    """Return the same configuration, adapted for `get_peft_model` on a model that is split already."""
    config._register_custom_module({ParallelModule: ShardedLora})
    return config


class ShardedLora(lora.Linear):  # type: ignore[misc]  # untyped where peft is not installed
    """peft's LoRA of a linear layer, with factors split as the layer is."""

    def __init__(self, base_layer: nn.Module, adapter_name: str, config: LoraConfig, **kwargs: Any) -> None:
        target = base_layer.get_base_layer() if isinstance(base_layer, lora.LoraLayer) else base_layer
        _require_linear(target)
        config = copy(config)
        config.fan_in_fan_out = isinstance(target, ColumnConv1D | RowConv1D)  # of the weight's layout
        super().__init__(base_layer, adapter_name, config, **kwargs)

    def _get_in_out_features(self, module: ParallelModule) -> tuple[int, int]:
        """Return the full layer's features: factors are drawn as for the unsharded model, then split."""
        weight = module.weight
        assert isinstance(weight, Tensor)
        sizes = list(weight.shape)
        sizes[Attributes.of(weight).partition_dim] *= module.world.size
        return (sizes[0], sizes[1]) if isinstance(module, ColumnConv1D | RowConv1D) else (sizes[1], sizes[0])

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
        if isinstance(base, _SPLIT_OUT):
            self.lora_B[adapter_name] = _column_factor(factors[1], base)
        else:
            self.lora_A[adapter_name] = _row_factor(factors[0], base)
            split_dropouts(self, Cut.along(-1, (factors[0].in_features,), base.world))


class ColumnFactor(ColumnParallelLinear):
    """B of a layer that is split along its out_features."""

    def forward(self, input_: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(input_)[0]


class RowFactor(RowParallelLinear):
    """A of a layer that is split along its in_features."""

    def forward(self, input_: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(input_)[0]


def _column_factor(full: nn.Linear, base: ParallelModule) -> ColumnFactor:
    stride = Attributes.of(base.get_parameter("weight")).partition_stride
    new = ColumnFactor(
        full.in_features,
        full.out_features,
        bias=full.bias is not None,
        gather_output=getattr(base, "gather_output", False),
        stride=stride,
        state=base.world.group,
        device="meta",
    )
    _take(new, full, base, dim=0, stride=stride)
    return new


def _row_factor(full: nn.Linear, base: ParallelModule) -> RowFactor:
    new = RowFactor(
        full.in_features,
        full.out_features,
        bias=False,
        input_is_parallel=getattr(base, "input_is_parallel", True),
        state=base.world.group,
        device="meta",
    )
    _take(new, full, base, dim=1, stride=1)
    return new


@torch.no_grad()
def _take(new: ParallelModule, full: nn.Linear, base: ParallelModule, *, dim: int, stride: int) -> None:
    """Set this rank's shard of each parameter."""
    world = base.world
    ranges = ranges_of(world.rank, size=full.weight.shape[dim], ranks=world.size, stride=stride)
    for short, old in full.named_parameters():
        own = torch.cat([old.narrow(dim, each.start, len(each)) for each in ranges], dim)
        setattr(new, short, nn.Parameter(own, requires_grad=old.requires_grad))


def _require_linear(target: nn.Module) -> None:
    if type(target) not in (*_SPLIT_OUT, *_SPLIT_IN):
        raise TypeError(
            f"LoRA: expected linear layers that parallelize has split as column or row, got "
            f"{type(target).__name__}; leave it out of target_modules, or apply LoRA before parallelize"
        )
    shares_tokens = getattr(target, "sequence_parallel", False) or getattr(target, "tokens", None) is not None
    if shares_tokens or getattr(target, "stacks", ()) or getattr(target, "split", None) is not None:
        raise ValueError(
            "LoRA: expected a layer without sequence_parallel and padded heads, whose stacked weights have "
            f"one size, got {target}; apply LoRA before parallelize"
        )
