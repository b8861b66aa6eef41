"""The argument `quantize=` of ops and layers: a recipe of fp8, and the checks that refuse it.

For callers of ops, which do not see kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tpkernels.kernels.operands import DTYPES
from tpkernels.kernels.recipe import Recipe as Recipe
from tpkernels.kernels.target import Target, fp8_obstacle
from tpkernels.ops.inputs import in_forward_mode
from tpkernels.ops.quantized.weights import reuse_quantized_weights as reuse_quantized_weights


def require_recipe(
    owner: str, recipe: object, device: torch.device | str | None = None, segments: int = 0
) -> None:
    """Raise unless `recipe` is a `Recipe` or None, and `device`, if it is known, multiplies fp8.

    segments: of TP-invariance, which goes with no recipe
    """
    if recipe is None:
        return
    if not isinstance(recipe, Recipe):
        raise TypeError(
            f"{owner}: expected quantize=tpkernels.Recipe.rowwise(), .blockwise() or None, got {recipe!r}"
        )
    if segments:
        raise ValueError(
            f"{owner}: expected no quantize with TP-invariance: scales of a row depend on how many features "
            "a rank has of it, and with them the bits; leave out one of them"
        )
    if device is not None:
        _require_fp8_of(owner, torch.device(device))


def require_quantizable(op: str, recipe: Recipe, x: Tensor, segments: int) -> None:
    """Raise unless `op` can quantize x by `recipe`: its device, dtype and derivatives."""
    require_recipe(op, recipe, x.device, segments)
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
    """Raise if `device` is a GPU that does not multiply fp8. CPUs multiply the same numbers in torch."""
    if device.type != "cuda":
        return
    is_amd = torch.version.hip is not None
    major, minor = (0, 0) if is_amd else torch.cuda.get_device_capability(device)
    if fp8_obstacle(Target("hip" if is_amd else "cuda", 10 * major + minor)) is None:
        return
    name = torch.cuda.get_device_name(device)
    if is_amd:
        raise ValueError(
            f"{owner}: expected an NVIDIA GPU with quantize, got {name}: AMD's fp8 has other formats (fnuz), "
            "for which there are no kernels; leave out quantize"
        )
    raise ValueError(
        f"{owner}: expected a GPU of compute capability 8.9 or later with quantize, got {name} of "
        f"{major}.{minor}, which does not multiply fp8; leave out quantize"
    )
