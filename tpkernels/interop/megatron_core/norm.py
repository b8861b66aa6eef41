"""Norms for Megatron's specs, also under sequence parallelism, which its local norm refuses."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tpkernels.interop.megatron_core.limits import require_no_invariance
from tpkernels.layers import norm as ours


def build_norm(
    config: Any,
    hidden_size: int,
    eps: float = 1e-5,
    persist_layer_norm: bool = False,
    zero_centered_gamma: bool = False,
    normalization: str = "LayerNorm",
) -> nn.Module:
    """What `config.normalization` names: a builder of Megatron's `layer_norm` submodules.

    persist_layer_norm, zero_centered_gamma, normalization: have no effect, as in Megatron; config decides
    """
    kinds: dict[str, type[nn.Module]] = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}
    if config.normalization not in kinds:
        raise NotImplementedError(
            f"build_norm: expected config.normalization LayerNorm or RMSNorm, got {config.normalization!r}"
        )
    return kinds[config.normalization](config, hidden_size, eps)


class _BuiltByMegatron:
    """Megatron's constructor; parameters are marked `sequence_parallel` where config says so."""

    returns_residual = False  # asked by later sources than 0.16

    def __init__(
        self,
        config: Any,
        hidden_size: int,
        eps: float = 1e-5,
        persist_layer_norm: bool = False,
        zero_centered_gamma: bool = False,
        normalization: str = "",
    ) -> None:
        _require_plain(type(self).__name__, config)
        super().__init__(
            hidden_size,  # type: ignore[call-arg]  # of the norm that is the other base
            eps,
            sequence_parallel=config.sequence_parallel,
            device=_device(config),
            dtype=config.params_dtype,
        )


class LayerNorm(_BuiltByMegatron, ours.LayerNorm):
    """Ours, with Megatron's constructor."""


class RMSNorm(_BuiltByMegatron, ours.RMSNorm):
    """Ours, with Megatron's constructor."""


def _require_plain(name: str, config: Any) -> None:
    require_no_invariance(name)
    for option in ("layernorm_zero_centered_gamma", "memory_efficient_layer_norm"):
        if getattr(config, option):
            raise NotImplementedError(f"{name}: expected config.{option}=False, got True")


def _device(config: Any) -> torch.device:
    return torch.device("cpu" if config.use_cpu_initialization else torch.cuda.current_device())
