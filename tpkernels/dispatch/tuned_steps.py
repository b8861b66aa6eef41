"""Each step by whoever is fastest at it on this GPU. The contract is `steps.Steps`."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from tpkernels.dispatch import torch_steps
from tpkernels.dispatch.cache import Cache
from tpkernels.dispatch.chooser import Chooser
from tpkernels.dispatch.gpus import gpu_of
from tpkernels.dispatch.log import show_choices_if_asked
from tpkernels.dispatch.shipped import shipped_choices
from tpkernels.dispatch.steps import Norm, Steps
from tpkernels.dispatch.timing import CudaTimer
from tpkernels.dispatch.versions import versions_for
from tpkernels.kernels.activations import Activation, Glu
from tpkernels.kernels.disk_cache import cache_folder
from tpkernels.kernels.operands import DTYPES
from tpkernels.kernels.tiles import MAX_FEATURES


class TunedSteps:
    """Steps on one device, each computed by the candidate that its chooser names."""

    def __init__(self, chooser: Chooser) -> None:
        self._call = chooser.call

    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation, keep_z: bool
    ) -> tuple[Tensor, Tensor | None]:
        y, z = self._call("linear", x, weight, bias, activation, keep_z)
        return y, z

    def linear_into(self, y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        y.copy_(self.linear(x, weight, bias, "none", keep_z=False)[0])

    def glu(
        self, x: Tensor, w_gate: Tensor, w_up: Tensor, kind: Glu, keep_gu: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        h, g, u = self._call("glu", x, w_gate, w_up, kind, keep_gu)
        return h, g, u

    def dgrad(self, dy: Tensor, weight: Tensor) -> Tensor:
        dx: Tensor = self._call("dgrad", dy, weight)
        return dx

    def dgrad_act(
        self, dy: Tensor, weight: Tensor, z: Tensor, activation: Activation, bias_grad: bool
    ) -> tuple[Tensor, Tensor | None]:
        dz, db = self._call("dgrad_act", dy, weight, z, activation, bias_grad)
        return dz, db

    def dglu(
        self, dy: Tensor, weight: Tensor, g: Tensor, u: Tensor, kind: Glu
    ) -> tuple[Tensor, Tensor, Tensor]:
        dg, du, h = self._call("dglu", dy, weight, g, u, kind)
        return dg, du, h

    def wgrad(self, dy: Tensor, x: Tensor) -> Tensor:
        dw: Tensor = self._call("wgrad", dy, x)
        return dw

    def wgrad_accumulate_(self, main_grad: Tensor, dy: Tensor, x: Tensor) -> None:
        self._call("wgrad_accumulate_", main_grad, dy, x)

    def bias_grad(self, dy: Tensor) -> Tensor:
        return torch_steps.bias_grad(dy)  # bound by memory either way: there is nothing to choose

    def norm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, kind: Norm, eps: float
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        return _norms_of(x).norm(x, weight, bias, kind, eps)

    def norm_grad(
        self, dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor, kind: Norm
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        return _norms_of(x).norm_grad(dy, x, weight, mean, rstd, kind)


def _norms_of(x: Tensor) -> Steps:
    """Our kernels, which read a row once, if they take rows like these; not timed against others yet."""
    if find_spec("triton") is None or x.dtype not in DTYPES or not 0 < x.shape[1] <= MAX_FEATURES:
        return torch_steps
    from tpkernels.dispatch import triton_steps

    return triton_steps


@cache
def chooser_on(device: torch.device) -> Chooser:
    """The chooser for a GPU of this machine, with its cache and what is shipped for it."""
    show_choices_if_asked()
    gpu = gpu_of(device)
    cache = Cache(cache_folder(), versions_for(gpu.name))
    return Chooser(device, gpu, CudaTimer(device), cache, shipped_choices(gpu.name))
