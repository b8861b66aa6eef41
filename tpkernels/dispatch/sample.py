"""Arguments of each step for a layer of given sizes, as a training step would make them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tpkernels.dispatch.problem import Step
from tpkernels.kernels.activations import Activation, Glu


@dataclass(frozen=True, slots=True)
class Layer:
    """A linear layer, and what surrounds it."""

    tokens: int
    out_features: int
    in_features: int
    dtype: torch.dtype = torch.bfloat16
    activation: Activation = "none"  # after it in `linear`, before it in `dgrad_act`
    glu: Glu = "swiglu"  # likewise in `glu` and `dglu`
    bias: bool = True
    training: bool = True  # pre-activations are kept for backward

    def arguments(self, step: Step) -> tuple[Any, ...]:
        """The step's arguments on the meta device: sizes and layouts without memory."""
        T, N, K = self.tokens, self.out_features, self.in_features
        x, weight, dy, below = self._meta(T, K), self._meta(N, K), self._meta(T, N), self._meta(T, K)
        match step:
            case "linear":
                bias = self._meta(N) if self.bias else None
                return x, weight, bias, self.activation, self.training and self.activation != "none"
            case "glu":
                return x, weight, self._meta(N, K), self.glu, self.training
            case "dgrad":
                return dy, weight
            case "dgrad_act":
                return dy, weight, below, self.activation, self.bias
            case "dglu":
                return dy, weight, below, self._meta(T, K), self.glu
            case "wgrad":
                return dy, x
            case "wgrad_accumulate_":
                return torch.empty(N, K, dtype=torch.float32, device="meta"), dy, x

    def _meta(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device="meta")
