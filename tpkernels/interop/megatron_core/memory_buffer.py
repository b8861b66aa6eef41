"""Megatron's global memory buffer: named scratch tensors that Megatron's own code asks `parallel_state` for.

tpkernels' layers do not use it: a second gather would overwrite the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from math import prod
from typing import Any

import torch
from torch import Tensor

from tpkernels.runtime.state import ParallelStateError, current

__all__ = [
    "GlobalMemoryBuffer",
    "destroy_global_memory_buffer",
    "destroy_global_symmetric_memory_buffer",
    "get_global_memory_buffer",
    "get_global_symmetric_memory_buffer",
]


class GlobalMemoryBuffer:
    """One tensor for each name and dtype, as large as the largest that was asked for."""

    def __init__(self) -> None:
        self.buffer: dict[tuple[str, torch.dtype], Tensor] = {}

    def get_tensor(
        self,
        tensor_shape: Sequence[int],
        dtype: torch.dtype,
        name: str,
        mem_alloc_context: Callable[[], AbstractContextManager[Any]] | None = None,
    ) -> Tensor:
        """Return the first elements of a tensor in this shape, with whatever is in them.

        mem_alloc_context: in which memory is allocated
        """
        needed = prod(tensor_shape)
        held = self.buffer.get((name, dtype))
        if held is None or held.numel() < needed:
            with (mem_alloc_context or nullcontext)():
                device = torch.accelerator.current_accelerator() or torch.device("cpu")
                held = self.buffer[name, dtype] = torch.empty(needed, dtype=dtype, device=device)
        return held[:needed].view(*tensor_shape)


class _PerProcess:
    """The buffers that `get_global_memory_buffer` and its symmetric twin return."""

    buffer: GlobalMemoryBuffer | None = None
    symmetric: Any = None  # Megatron's own


def set_global_memory_buffer() -> None:
    """Make a new buffer, for a new parallel state."""
    _PerProcess.buffer = GlobalMemoryBuffer()


def get_global_memory_buffer() -> GlobalMemoryBuffer:
    """Return the buffer of the current parallel state, or raise."""
    if _PerProcess.buffer is None:
        raise ParallelStateError(
            "global memory buffer is not initialized: call initialize_model_parallel first"
        )
    return _PerProcess.buffer


def destroy_global_memory_buffer() -> None:
    """Drop the buffer of the current parallel state."""
    _PerProcess.buffer = None


def set_global_symmetric_memory_buffer() -> None:
    """Make Megatron's own buffer, for its inference."""
    if _PerProcess.symmetric is not None:
        raise ParallelStateError("global symmetric memory buffer is already initialized")
    buffer = import_module("megatron.core.utils").GlobalSymmetricMemoryBuffer
    _PerProcess.symmetric = buffer(size_in_mb=256, process_group=current().process_group("tp"))


def get_global_symmetric_memory_buffer() -> Any:
    """Return Megatron's symmetric buffer, or raise."""
    if _PerProcess.symmetric is None:
        raise ParallelStateError("global symmetric memory buffer is not initialized")
    return _PerProcess.symmetric


def destroy_global_symmetric_memory_buffer() -> None:
    """Drop Megatron's symmetric buffer."""
    _PerProcess.symmetric = None
