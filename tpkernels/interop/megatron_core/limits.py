"""What Megatron may ask of a layer that ours do not do: an error that names it."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from tpkernels.tp_invariance import VARIABLE, mode

DRAINING = "fused_weight_gradient_mlp_cuda"  # with what Megatron computes gradients that were deferred


def require_supported(layer: Any) -> None:
    """Called in each forward: what it asks for may change after construction."""
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
    if gtp_remat_size > 1:
        raise NotImplementedError(
            f"{caller}: expected gtp_weight_remat_size 1, got {gtp_remat_size}: weights are not gathered for "
            "each use"
        )


def require_dtype(caller: str, output_dtype: torch.dtype | None, x: Tensor) -> None:
    if output_dtype not in (None, x.dtype):
        raise NotImplementedError(
            f"{caller}: expected no output_dtype, or that of the input, {x.dtype}, got {output_dtype}"
        )


def require_no_invariance(caller: str) -> None:
    if mode.segments:
        raise NotImplementedError(
            f"{caller}: expected no TP-invariance inside Megatron, got {mode.segments} segments: Megatron's "
            f"own attention, losses and optimizer depend on the tensor-parallel size; unset {VARIABLE}"
        )


def require_draining(caller: str, config: Any) -> None:
    """Deferred gradients are computed by Megatron, after the last backward: too late to find out."""
    if config.defer_embedding_wgrad_compute and find_spec(DRAINING) is None:
        raise NotImplementedError(
            f"{caller}: expected defer_embedding_wgrad_compute=False where apex is not installed, got True: "
            f"Megatron computes what it defers with apex's {DRAINING}"
        )


def require_own_main_grad(caller: str, weight: Tensor) -> None:
    if hasattr(weight, "__fsdp_param__"):
        raise NotImplementedError(
            f"{caller}: expected gradient_accumulation_fusion=False under Megatron-FSDP, got True: its "
            "main_grad does not exist before backward; turn the fusion off"
        )


def require_no_transformer_engine(layer: object, *_: object, **__: object) -> None:
    """The `__init__` of Transformer Engine's linear layers where ours are wanted."""
    raise NotImplementedError(
        f"{type(layer).__name__}: expected no linear layer of Transformer Engine inside layers(), it would "
        "not be ours; make the spec by get_gpt_layer_local_spec"
    )
