"""The steps that ops are made of, and who computes them: torch, or our Triton kernels.

TPKERNELS_BACKEND, read when this module is imported, says which:

    auto      torch on the CPU; on a GPU whoever is fastest, see `chooser` (the default)
    torch     torch everywhere
    triton    Triton everywhere: on the CPU only in its interpreter (TRITON_INTERPRET=1)

With TPKERNELS_BATCH_INVARIANT=1 `auto` is Triton on a GPU: torch's libraries choose their kernels by the
number of rows, and a timed choice would depend on the batch that came first.
"""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from typing import Literal, Protocol

import torch
from torch import Tensor

from tpkernels.dispatch import log
from tpkernels.kernels import invariance
from tpkernels.kernels.activations import Activation, Glu

BACKENDS = ("auto", "torch", "triton")
Norm = Literal["rms_norm", "layer_norm"]

# Read once: looking into the environment takes as long as a tenth of a tiny product.
backend = os.environ.get("TPKERNELS_BACKEND", "auto")


class Steps(Protocol):
    """2-D tensors in, new tensors out, unless a name says otherwise. T tokens, N out_features, K in_features.

    A result that was not asked for is None.
    """

    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation, keep_z: bool
    ) -> tuple[Tensor, Tensor | None]:
        """y = act(z), z = x weightᵀ + bias -> (y, z)."""

    def linear_into(self, y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """y = x weightᵀ + bias, into rows of a larger tensor."""

    def glu(
        self, x: Tensor, w_gate: Tensor, w_up: Tensor, kind: Glu, keep_gu: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """h = f(g) * u, g = x w_gateᵀ, u = x w_upᵀ -> (h, g, u)."""

    def dgrad(self, dy: Tensor, weight: Tensor) -> Tensor:
        """dy weight: the gradient of x in x weightᵀ."""

    def dgrad_act(
        self, dy: Tensor, weight: Tensor, z: Tensor, activation: Activation, bias_grad: bool
    ) -> tuple[Tensor, Tensor | None]:
        """dz = (dy weight) * act'(z) and its sum over tokens in fp32 -> (dz, db)."""

    def dglu(
        self, dy: Tensor, weight: Tensor, g: Tensor, u: Tensor, kind: Glu
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of g and u in (f(g) * u) weightᵀ, and f(g) * u again -> (dg, du, h)."""

    def wgrad(self, dy: Tensor, x: Tensor) -> Tensor:
        """dyᵀ x: the gradient of weight in x weightᵀ."""

    def wgrad_accumulate_(self, main_grad: Tensor, dy: Tensor, x: Tensor) -> None:
        """main_grad += dyᵀ x, in place; main_grad may be wider than dy and x."""

    def bias_grad(self, dy: Tensor) -> Tensor:
        """The sum over tokens, in fp32."""

    def norm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, kind: Norm, eps: float
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """y = (x - mean) * rstd * weight + bias -> (y, mean, rstd); RMSNorm has no mean and no bias."""

    def norm_grad(
        self, dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor, kind: Norm
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The gradients of x, and in fp32 of weight and bias -> (dx, dw, db)."""


@cache
def _by(backend: str, device: torch.device) -> Steps:
    if backend not in BACKENDS:
        raise ValueError(f"TPKERNELS_BACKEND is {backend!r}; expected one of {', '.join(BACKENDS)}")
    # imported here: a CPU user need not have Triton
    if backend == "triton" or (backend == "auto" and device.type == "cuda" and invariance.batch_invariant):
        from tpkernels.dispatch import triton_steps

        return triton_steps
    if backend == "auto" and device.type == "cuda":
        if find_spec("triton") is not None:
            from tpkernels.dispatch.tuned_steps import TunedSteps, chooser_on

            return TunedSteps(chooser_on(device))
        log.warnings.warning("torch computes on %s: Triton is not installed", device)
    from tpkernels.dispatch import torch_steps

    if invariance.batch_invariant:
        log.warnings.warning(
            "torch computes on %s: TPKERNELS_BATCH_INVARIANT=1 promises nothing there", device
        )
    return torch_steps


def steps_on(device: torch.device) -> Steps:
    """Who computes for tensors on `device`. An explicit choice never falls back silently."""
    return _by(backend, device)
