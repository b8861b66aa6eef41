"""Which tensors collectives take. Raw backends answer others with silence, garbage, or a crash."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
Problem = tuple[str, str]  # why a rank cannot take part: the type of an error, and its text
REDUCIBLE = (*FLOATING, torch.int64, torch.int32, torch.int8, torch.uint8)


def problem_of(
    named_tensors: Iterable[tuple[str, object]], dtypes: tuple[torch.dtype, ...], *, written: bool
) -> Problem | None:
    """The first reason, if any, why the tensors cannot be sent: the type of the error and its text.

    written: results are written into the tensors
    """
    device: torch.device | None = None
    for name, tensor in named_tensors:
        if not isinstance(tensor, Tensor):
            return "TypeError", f"'{name}': expected a tensor, got {type(tensor).__name__}"
        if tensor.layout != torch.strided:
            return "TypeError", f"'{name}' is {tensor.layout}; expected a dense tensor: call to_dense() on it"
        if tensor.dtype not in dtypes:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            return "TypeError", f"'{name}' is {tensor.dtype}; expected one of {names}: convert it"
        if tensor.is_meta:
            return "ValueError", f"'{name}' is on the meta device, without data; materialise it first"
        if written and torch._debug_has_internal_overlap(tensor) == 1:
            return (
                "ValueError",
                f"'{name}' has elements that share memory (expand?); expected its own: clone it",
            )
        device = device or tensor.device
        if tensor.device != device:
            return "ValueError", f"'{name}' is on {tensor.device}, others on {device}; expected one device"
    return None
