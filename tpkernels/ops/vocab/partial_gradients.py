"""Gradients of a head over chunks of tokens, and their sum over ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from tpkernels.comm.tensor_parallel import TensorParallel
from tpkernels.comm.transports.rows import Terms
from tpkernels.dispatch.products import sums_dtype
from tpkernels.ops.inputs import as_dtype
from tpkernels.ops.matmul import Plain


class PartialGradients:
    """Accumulates this rank's terms of the gradients over chunks; None for those that are not needed."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        needs_dhidden: bool,
        needs_dweight: bool,
        tp: TensorParallel,
        matmul: Plain,
    ) -> None:
        self._hidden, self._weight, self._matmul = hidden, weight, matmul
        wide = sums_dtype(weight.dtype)
        # contiguous, whatever hidden is: kernels write rows of it
        self.dhidden = (
            hidden.new_empty(hidden.shape, dtype=terms_dtype(hidden.dtype, tp)) if needs_dhidden else None
        )
        self.dweight = torch.zeros_like(weight, dtype=wide) if needs_dweight else None

    def add(self, rows: slice, dlogits: Tensor) -> None:
        matmul = self._matmul
        if self.dhidden is not None:
            pairs = [(matmul.pack(dlogits, "dy"), self._weight)]
            self.dhidden[rows] = matmul.terms(pairs, False, self.dhidden.dtype).at_once()
        if self.dweight is not None:
            hidden = self._hidden[rows]
            matmul.wgrad(dlogits, hidden, self.dweight, split="dy")


def terms_dtype(dtype: torch.dtype, tp: TensorParallel) -> torch.dtype:
    """The dtype of a rank's terms of a sum: rounded, or with TP-invariance as wide as the sum."""
    return sums_dtype(dtype) if tp.segments else dtype


def sum_over_ranks(
    dhidden: Tensor, scale: Tensor | None, dtype: torch.dtype, op: str, tp: TensorParallel
) -> Tensor:
    """Sum dhidden over ranks, times scale; return all of it, or this rank's tokens."""
    term_scale = None if tp.segments else scale
    terms = Terms(
        dhidden.shape[0],
        dhidden.shape[1],
        dhidden,
        lambda rows: dhidden[rows] if term_scale is None else dhidden[rows] * term_scale,
        tree=tp.segments > 0,
    )
    total = tp.reduce(f"{op} backward", terms).wait()
    if scale is not None and tp.segments:
        total = total * scale
    return as_dtype(total, dtype)
