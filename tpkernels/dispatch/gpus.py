"""The GPU that a choice is made for: a value, so that choices can be looked at without having one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tpkernels import gpus
from tpkernels.kernels.target import A100, B200, H100, MI300, Target, target_of


@dataclass(frozen=True, slots=True)
class Gpu:
    """A model of GPU, as far as choosing cares."""

    name: str  # as torch spells it
    target: Target


_TARGETS = {
    "a100": A100,
    "l40s": Target("cuda", 89, 142),
    "h100": H100,
    "h200": H100,
    "b200": B200,
    "mi300x": MI300,
}
GPUS: Mapping[str, Gpu] = {key: Gpu(gpus.GPUS[key].name, target) for key, target in _TARGETS.items()}


def gpu_of(device: torch.device) -> Gpu:
    """The GPU of a device; in a process that interprets kernels the CPU stands in for one."""
    target = target_of(device)
    if target.backend == "interpreter":
        return Gpu("interpreter", target)
    return Gpu(torch.cuda.get_device_name(device), target)
