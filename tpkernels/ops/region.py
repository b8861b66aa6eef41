"""Registered operators in autocast regions: called directly, they cast as `ops.linear` and its like do.

`torch.library`'s own `register_autocast` casts to one dtype for good, whatever the region asks for.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from tpkernels.ops.inputs import as_dtype

_LIBRARY = torch.library.Library("tpkernels", "IMPL")
_KEY = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}


def follow_autocast(op: Any) -> None:
    """Let a custom operator cast its tensors to the dtype of an active autocast region."""
    for device, key in _KEY.items():
        _LIBRARY.impl(op._opoverload, partial(_call_with_casts, op, device), key)


def _call_with_casts(op: Any, device: str, *arguments: Any) -> Any:
    dtype = torch.get_autocast_dtype(device)
    cast = [
        as_dtype(argument, dtype)
        if isinstance(argument, Tensor) and argument.is_floating_point() and argument.dtype != torch.float64
        else argument
        for argument in arguments
    ]
    with torch.autocast(device, enabled=False):
        return op(*cast)
