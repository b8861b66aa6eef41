"""Layers for Hugging Face's `kernels`: forwards without state, which replace those of a model's modules.

RMSNorm    a module with `weight` and `variance_epsilon`, such as LlamaRMSNorm
LayerNorm  nn.LayerNorm of the last dimension, with a weight
Linear     nn.Linear
SwiGLUMLP  a module with gate_proj, up_proj and down_proj, and silu as `config.hidden_act`, such as LlamaMLP
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tpkernels.ops.local.linear import linear
from tpkernels.ops.local.mlp import mlp
from tpkernels.ops.local.norm import layer_norm, rms_norm


class RMSNorm(nn.Module):
    can_torch_compile = True
    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, self.weight, eps=self.variance_epsilon)


class LayerNorm(nn.Module):
    can_torch_compile = True
    weight: Tensor
    bias: Tensor | None
    eps: float

    def forward(self, input: Tensor) -> Tensor:
        return layer_norm(input, self.weight, self.bias, eps=self.eps)


class Linear(nn.Module):
    can_torch_compile = True
    weight: Tensor
    bias: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


class SwiGLUMLP(nn.Module):
    can_torch_compile = True
    config: Any
    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear

    def forward(self, x: Tensor) -> Tensor:
        if self.config.hidden_act != "silu" or getattr(self.gate_proj, "bias", None) is not None:
            raise ValueError(
                "SwiGLUMLP: expected hidden_act='silu', and gate_proj without a bias, got "
                f"{self.config.hidden_act!r} and {self.gate_proj}; leave this model out of the mapping"
            )
        up, down = self.up_proj, self.down_proj
        return mlp(x, up.weight, up.bias, down.weight, down.bias, w_gate=self.gate_proj.weight)
