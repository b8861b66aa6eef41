"""Sums over ranks that the backend takes itself, if TPKERNELS_BACKEND_SUMS=1: off by default.

A reduce is then one reduce_scatter_tensor, and an all-reduce one all_reduce: no slots are written and read.
The backend adds in an order of its own, and may round in between; the bias is added to the rounded sum. So
bits depend on how ranks are connected and on the backend's version.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from tpkernels.comm.calls import Call
from tpkernels.comm.groups import start_all_reduce, start_reduce_scatter
from tpkernels.comm.transports.c10d import Transfers
from tpkernels.env import env_flag
from tpkernels.tp_invariance import mode

# Read once. Ranks that differ in it begin calls of other names, which they compare.
backend_sums = env_flag("TPKERNELS_BACKEND_SUMS", default=False)
NOTE = " by the backend"  # in what such calls are called


def require_backend_sums(op: str, device: torch.device, transport: str) -> None:
    """Raise an error if the option is set where the backend cannot take the sums."""
    if device.type != "cuda" or transport not in ("auto", "c10d"):
        raise ValueError(
            f"{op}: TPKERNELS_BACKEND_SUMS=1 leaves sums of tensors on GPUs to NCCL, got {device.type} and "
            f"TPKERNELS_TRANSPORT={transport}; unset one of them"
        )
    if mode.segments:
        raise ValueError(
            f"{op}: TPKERNELS_BACKEND_SUMS=1 adds in an order of its own{mode.described} asks for one order; "
            "unset one of them"
        )


class BackendSumming:
    """Partial sums of all ranks on their way to the owners of the rows, or to all."""

    def __init__(self, call: Call, partial: Tensor, bias: Tensor | None, *, scatter: bool) -> None:
        """partial: (rows, cols); an all-reduce writes it"""
        partial, calls = partial.contiguous(), call.calls
        rows, cols = partial.shape
        total = partial.new_empty(rows // calls.ranks, cols) if scatter else partial
        self._total, self._bias = total, bias
        self._transfers = Transfers(call)
        if not partial.numel():
            return
        self._transfers.collective(
            lambda group: (
                start_reduce_scatter(group, total, partial, ReduceOp.SUM, None)
                if scatter
                else start_all_reduce(group, partial, ReduceOp.SUM, None)
            ),
            [peer for peer in range(calls.ranks) if peer != calls.rank],
            partial,
        )

    def wait(self) -> Tensor:
        """Wait, and return the sums plus bias."""
        self._transfers.await_sends()
        return self._total if self._bias is None else self._total + self._bias
