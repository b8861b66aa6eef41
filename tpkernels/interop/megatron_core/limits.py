"""What Megatron may ask of a layer that ours do not do: an error that names it."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from torch import Tensor

from tpkernels.tp_invariance import VARIABLE, mode

DRAINING = "fused_weight_gradient_mlp_cuda"  # with what Megatron computes gradients that were deferred


def require_supported(caller: str, config: Any) -> None:
    """config: a ModelParallelConfig. Called in each forward."""
    if mode.segments:
        raise NotImplementedError(
            f"{caller}: expected no TP-invariance inside Megatron, got {mode.segments} segments: Megatron's "
            f"own attention, losses and optimizer depend on the tensor-parallel size; unset {VARIABLE}"
        )
    offloading = getattr(config, "_cpu_offloading_context", None)
    if offloading is not None and offloading.inside_context:
        raise NotImplementedError(
            f"{caller}: expected cpu_offloading=False, got True: Transformer Engine offloads the activations "
            "of its own layers only"
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
