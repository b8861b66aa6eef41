"""Where fp8 is refused, and why; before anything is enqueued."""

from __future__ import annotations

import torch
from torch import Tensor

from tpkernels.kernels.recipe import Recipe
from tpkernels.ops.inputs import in_forward_mode
from tpkernels.tp_invariance import mode

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LEAST_CAPABILITY = (8, 9)


def require_recipe(owner: str, recipe: object, device: torch.device | str | None = None) -> None:
    """A recipe, or None; and if the device is known, one that multiplies fp8."""
    if recipe is None:
        return
    if not isinstance(recipe, Recipe):
        raise TypeError(
            f"{owner}: expected quantize=tpkernels.Recipe.rowwise(), .blockwise() or None, got {recipe!r}"
        )
    if mode.segments:
        raise ValueError(
            f"{owner}: expected no quantize with TP-invariance: scales of a row depend on how many features "
            "a rank has of it, and with them the bits; leave out one of them"
        )
    if device is not None:
        _require_fp8_of(owner, torch.device(device))


def require_quantizable(op: str, recipe: Recipe, x: Tensor) -> None:
    require_recipe(op, recipe, x.device)
    if x.dtype not in DTYPES:
        raise TypeError(
            f"{op}: expected x in bfloat16, float16 or float32 with quantize, got {x.dtype}: convert it, or "
            "leave out quantize"
        )
    if in_forward_mode():
        raise NotImplementedError(
            f"{op}: expected no forward-mode derivative (jvp) with quantize; use reverse mode"
        )


def _require_fp8_of(owner: str, device: torch.device) -> None:
    """CPUs compute it as torch's products of the same numbers; the meta device computes nothing."""
    if device.type != "cuda":
        return
    if torch.version.hip is not None:
        raise ValueError(
            f"{owner}: expected an NVIDIA GPU with quantize, got {torch.cuda.get_device_name(device)}: AMD's "
            "fp8 has other formats (fnuz), for which there are no kernels; leave out quantize"
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise ValueError(
            f"{owner}: expected a GPU of compute capability 8.9 or later with quantize, got {name} of "
            f"{capability[0]}.{capability[1]}, which does not multiply fp8; leave out quantize"
        )
