"""A residual and a norm behind a sum over ranks: how `row_linear` and `parallel_mlp` may end.

T tokens, N features; y, (T, N), is what the op computes without them:

    forward   h = y + residual,  normed = norm(h)          where a kernel adds the slots of ranks, in its pass
    backward  dh = dnormed through the norm + dh of h      one pass; dy and dresidual are dh
              dweight, dbias of the norm                   as in `ops.local.norm`

Under sequence parallelism T are this rank's tokens. Op, addition and norm one after the other give the same
bits; on a GPU h has them, and normed up to the order of sums over a row. Where bits must not depend on sizes,
with TP-invariance and in batch-invariant mode, the sum over ranks is a pass of its own, and the rest one.

Saved for backward: h, the norm's weight, and its statistics of each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tpkernels.comm.tensor_parallel import TensorParallel
from tpkernels.comm.transports.rows import Terms
from tpkernels.dispatch import norms
from tpkernels.dispatch.products import sums_dtype
from tpkernels.dispatch.record import launcher
from tpkernels.kernels import invariance
from tpkernels.kernels.operands import DTYPES
from tpkernels.kernels.tiles import MAX_SLOT_ROW
from tpkernels.ops.inputs import as_dtype, in_forward_mode, tokens_of
from tpkernels.ops.local.norm import Norm, NormKind, check_parameter, norm_gradients, segments_of_tokens
from tpkernels.ops.matmul import Plain
from tpkernels.ops.tensor_parallel.parallel import FakeMatmul, alone_in

_by_kernel = launcher("reduce", "add_norm")


class Added(NamedTuple):
    """What an op adds to y, checked, as its operator takes it: residual and norm."""

    residual: Tensor | None  # (tokens, features)
    weight: Tensor | None
    bias: Tensor | None
    kind: NormKind | str  # "": neither residual nor norm
    eps: float


NOTHING = Added(None, None, None, "", 0.0)
NO_GRADIENTS: Sequence[Tensor | None] = (None, None, None)  # of residual, weight and bias
SCHEMA = "Tensor? residual, Tensor? norm_weight, Tensor? norm_bias, str norm, float eps"


class Saved(NamedTuple):
    """What backward needs to know, beside the tensors that forward has saved."""

    kind: NormKind
    segments: int  # of tokens, whose sums are added in a tree; 0: without TP-invariance
    y_dtype: torch.dtype
    dtypes: tuple[torch.dtype, torch.dtype | None]  # of the norm's weight and bias


def added(
    op: str,
    residual: Tensor | None,
    norm: Norm | None,
    x: Tensor,
    shape: Sequence[int],
    tp: TensorParallel,
) -> tuple[Added, Saved]:
    """Check what is added to y. x: has the dtype and device of y; shape: of y"""
    if residual is None or norm is None:
        given, other = ("norm", "residual") if residual is None else ("residual", "norm")
        raise ValueError(f"{op}: expected residual and norm together, got {given} alone; pass {other}, too")
    if not isinstance(norm, Norm):
        raise TypeError(f"{op}: expected an ops.Norm as norm, got {type(norm).__name__}")
    if residual.shape != torch.Size(shape):
        raise ValueError(
            f"{op}: expected residual {tuple(shape)} like the output, got {tuple(residual.shape)}; with "
            "sequence_parallel it is this rank's tokens"
        )
    if not residual.is_floating_point():
        raise TypeError(f"{op}: expected a floating-point residual, got {residual.dtype}; cast it")
    if residual.device != x.device:
        raise ValueError(
            f"{op}: expected one device, got x on {x.device} and residual on {residual.device}; move one"
        )
    residual = as_dtype(residual, torch.promote_types(residual.dtype, x.dtype))  # as an addition does
    weight, bias = norm.weight, norm.bias
    for name, parameter in (("norm.weight", weight), ("norm.bias", bias)):
        if parameter is not None:
            check_parameter(op, name, parameter, residual, shape[-1])
    if norm.zero_centered:
        weight = weight.to(sums_dtype(residual.dtype)) + 1
    recorded = torch.is_grad_enabled() or in_forward_mode()  # else no sum over tokens will be taken
    over = tp if tp.sequence_parallel and recorded else alone_in(tp.segments)
    segments = segments_of_tokens(op, residual, over) if tp.segments else 0
    how = Saved(norm.kind, segments, x.dtype, (weight.dtype, None if bias is None else bias.dtype))
    return Added(tokens_of(residual), weight, bias, norm.kind, norm.eps), how


class ResidualNorm:
    """Computes what follows one sum: after it, or in the pass of the kernel that adds its slots."""

    def __init__(self, given: Added) -> None:
        self._given = given
        self._found: list[Tensor] = []

    def add_slots(self, slots: Tensor, bias: Tensor | None, **how: Any) -> Tensor:
        """Add the slots by our kernel; return h. how: as `reduce_slots` takes it"""
        assert not how.pop("tree"), "with TP-invariance the sum is a pass of its own"
        residual, weight, norm_bias, kind, eps = self._given
        centre = kind == "layer_norm"
        results = _by_kernel(slots, residual, weight, norm_bias, bias=bias, eps=eps, centre=centre, **how)
        self._found = [result for result in results if result is not None]
        return self._found[0]

    def of(self, total: Tensor) -> list[Tensor]:
        """Return h, its norm, and the statistics of each token. total: y, or h of `add_slots`"""
        if self._found and self._found[0] is total:
            return self._found
        residual, weight, bias, kind, eps = self._given
        assert residual is not None
        assert weight is not None
        results = norms.add_norm(total, residual, weight, bias, eps, kind == "layer_norm")
        return [result for result in results if result is not None]

    def empty(self, total: Tensor) -> list[Tensor]:
        """Return empty tensors like the results of `of`."""
        residual, count = self._given.residual, 2 if self._given.kind == "layer_norm" else 1
        assert residual is not None
        statistics = (residual.new_empty(len(total), dtype=sums_dtype(residual.dtype)) for _ in range(count))
        return [*(residual.new_empty(total.shape) for _ in range(2)), *statistics]


def reduced(
    op: str, terms: Terms, bias: Tensor | None, given: Added, tp: TensorParallel, matmul: Plain
) -> list[Tensor]:
    """Sum terms over ranks; return what follows as `ResidualNorm.of` does."""
    after, residual = ResidualNorm(given), given.residual
    assert residual is not None
    is_taken = terms.dtype in (None, residual.dtype) and residual.dtype in DTYPES
    fits = terms.cols * residual.element_size() <= MAX_SLOT_ROW
    if is_taken and fits and not invariance.why_fixed():
        terms.after = after
    total = tp.reduce(op, terms, bias).wait()
    return after.empty(total) if isinstance(matmul, FakeMatmul) else after.of(total)


def gradients(
    how: Saved,
    tensors: Sequence[Tensor],
    gradients_of_results: Sequence[Tensor],
    needs: Sequence[bool],
    tp: TensorParallel,
) -> tuple[Tensor, Sequence[Tensor | None]]:
    """Return the gradient of y, and those of residual, and weight and bias of the norm.

    tensors: h, weight and statistics, as saved; gradients_of_results: of h and of its norm
    needs: of residual, weight, bias
    """
    (h, weight, *statistics), (dh, dnormed) = tensors, gradients_of_results
    # of this rank's tokens; with TP-invariance of all, so that rounding does not depend on their split
    over = tp if tp.sequence_parallel and any(needs[1:]) else alone_in(tp.segments)
    total, *sums = norm_gradients(dnormed, h, weight, statistics, how.kind, how.segments, over, plus=dh)
    of_parameters = [
        as_dtype(sums[i], dtype) if need and dtype else None
        for i, (need, dtype) in enumerate(zip(needs[1:], how.dtypes, strict=True))
    ]
    return as_dtype(total, how.y_dtype), [total if needs[0] else None, *of_parameters]
