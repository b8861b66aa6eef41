"""Ranks of a tensor-parallel group compute alike: the choices of their GPUs go through one store."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tpkernels.dispatch.backends import resolve_backend
from tpkernels.dispatch.chooser import chooser_on


def agree_choices(device: torch.device) -> None:
    """From now on kernels on this GPU are chosen as other ranks choose them.

    Through the store of the world: a rank may be in several tensor-parallel groups, and has one chooser.
    """
    if device.type == "cuda" and dist.is_initialized() and resolve_backend(device) == "fastest":
        chooser_on(device).agree_through(distributed_c10d._get_default_store())
