"""Which tensors collectives take, and which ranks may average a parameter's gradients.

Raw backends answer other tensors with silence, garbage, or a crash. Shards are not averaged over ranks that
hold other shards, which are other rows or columns of a weight.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from tpkernels.comm.agreement import Problem
from tpkernels.comm.groups import listed, mixing_of

FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
REDUCIBLE = (*FLOATING, torch.int64, torch.int32, torch.int8, torch.uint8)


def problem_of(
    named_tensors: Iterable[tuple[str, object]], dtypes: tuple[torch.dtype, ...], *, written: bool
) -> Problem | None:
    """Return why the tensors cannot be sent, as an error's type and text, or None.

    written: results are written into the tensors
    """
    device: torch.device | None = None
    for name, tensor in named_tensors:
        if not isinstance(tensor, Tensor):
            return "TypeError", f"'{name}': expected a tensor, got {type(tensor).__name__}"
        if hasattr(type(tensor), "device_mesh"):
            return "TypeError", (
                f"'{name}' is a DTensor; expected a plain tensor: use fully_shard, or parallelize without "
                "as_dtensor"
            )
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
        if written and tensor.is_neg():  # torch's collectives write into a copy
            return (
                "ValueError",
                f"'{name}' has torch's lazy negation; expected memory that holds its numbers: call "
                "resolve_neg() on it",
            )
        device = device or tensor.device
        if tensor.device != device:
            return "ValueError", f"'{name}' is on {tensor.device}, others on {device}; expected one device"
    return None


def problem_over(
    named: Iterable[tuple[str, Tensor]],
    ranks: Collection[int],
    *,
    tensor_parallel_ranks: Collection[int],
    average: bool,
) -> Problem | None:
    """Return why `GradientBuckets` may not reduce gradients of these parameters over `ranks`, or None.

    tensor_parallel_ranks: of the `tensor_parallel_group` that was given; parameters of layers know their own
    """
    for name, parameter in named:
        holders = {*tensor_parallel_ranks, *getattr(parameter, "tensor_parallel_ranks", ())}
        if getattr(parameter, "tensor_model_parallel", False):
            text = mixing_of(name, holders, ranks, "GradientBuckets")
            if text is not None:
                return "ValueError", text
            continue
        summed = getattr(parameter, "sequence_parallel", False) and len(holders & set(ranks)) > 1
        if summed and (average or tensor_parallel_ranks):
            return "ValueError", (
                f"'{name}' is marked sequence_parallel: its gradient is to be summed once over "
                f"tensor-parallel ranks {listed(holders)}, but `group` has ranks {listed(ranks)}, and "
                f"would {'average' if average else 'sum again'}; pass the data-parallel group, and the "
                "tensor-parallel one as tensor_parallel_group"
            )
    return None
