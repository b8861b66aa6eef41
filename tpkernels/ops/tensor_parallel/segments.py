"""How an op computes under TP-invariance: results have the same bits at every number of ranks.

Torch's libraries choose their algorithms by sizes. So each call to torch takes one segment of what ranks
share, and one block of rows: sizes that do not depend on the number of ranks. Our kernels compute an element
alike wherever it lies, and take everything at once. See `tp_invariance`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tpkernels.comm.transports.rows import Gather, Terms
from tpkernels.dispatch import backends, primitives
from tpkernels.dispatch.products import sums_dtype
from tpkernels.dispatch.record import launcher
from tpkernels.kernels.activations import Activation, act_ref
from tpkernels.ops.inputs import as_dtype
from tpkernels.ops.main_grad import Into, dtype_of_gradient, weight_gradient
from tpkernels.ops.matmul import Along, Direction, Pair, Plain, Waiting, columns, rows_of
from tpkernels.tp_invariance import tree_sum

_by_kernel = launcher("segments", "segment_sum", "transposed", "segments")
_LINE = 64  # bytes: libraries may add in another order where memory begins elsewhere
LEAST_ROWS = 256  # of a block; fewer cost a product more than what arrives early saves


def torch_computes(device: torch.device) -> bool:
    """Whether libraries do, whose kernel, and with it the bits, depend on the sizes of a product."""
    return backends.resolve_backend(device) == "torch"


def canonical(tensor: Tensor) -> Tensor:
    """The tensor as libraries find it at every number of ranks: contiguous and aligned."""
    whole = tensor.contiguous()
    whole = whole.clone() if whole.data_ptr() % _LINE else whole
    # contiguous or not, a dimension of size 1 may have any stride, by which libraries choose their way
    return whole.view(-1).view(whole.shape) if 1 in whole.shape else whole


def segment_of(tensor: Tensor, dim: int, segment: int, segments: int) -> Tensor:
    """One of `segments` equal parts along `dim`."""
    width = tensor.shape[dim] // segments
    return canonical(tensor.narrow(dim, segment * width, width))


def segment_sum(pairs: Sequence[Pair], *, transposed: bool, segments: int) -> Tensor:
    """Σ a wᵀ if transposed, else Σ a w, in fp32 or wider: of each segment of the depth, added in a tree."""
    if torch_computes(pairs[0][0].device):
        products = (_product(pairs, transposed, each, segments) for each in range(segments))
        return tree_sum(products, Tensor.add_)
    total: Tensor = _by_kernel(pairs, transposed, segments)
    return total


def _product(pairs: Sequence[Pair], transposed: bool, segment: int, segments: int) -> Tensor:
    total: Tensor | None = None
    for a, w in pairs:
        wide = sums_dtype(a.dtype)
        a_part = segment_of(a, 1, segment, segments).to(wide)
        w_part = segment_of(w, 1 if transposed else 0, segment, segments).to(wide)
        product = a_part @ (w_part.t() if transposed else w_part)
        total = product if total is None else total.add_(product)
    assert total is not None, "a sum of at least one product"
    return total


def segment_calls(segments: int, device: torch.device) -> int:
    """The number of calls, of one segment each, that compute a result; 0: one call computes all."""
    return segments if segments and torch_computes(device) else 0


def map_segments(
    segments: int, function: Callable[..., Tensor], *tensors: Tensor, dim: int = 1, cut: int = 1
) -> Tensor:
    """Compute function(*tensors) by a call for each segment; by one call if segments is 0.

    cut: the dimension of tensors that is cut; dim: that of the result
    """
    if not segments:
        return function(*tensors)
    parts = [
        function(*(segment_of(tensor, cut, segment, segments) for tensor in tensors))
        for segment in range(segments)
    ]
    return torch.cat(parts, dim)


def segmented_weight_gradient(dy: Tensor, x: Tensor, into: Into, segments: int, *, dim: int) -> Tensor | None:
    """Compute `weight_gradient` by a product for each segment; by one if segments is 0.

    dim: 0: dy is split over ranks, and with it the rows of the result; 1: x, and its columns
    """
    if not segments:
        return weight_gradient(dy, x, into)
    whole = canonical(x if dim == 0 else dy)
    total = into if isinstance(into, Tensor) else None
    if total is None:
        total = x.new_zeros(dy.shape[1], x.shape[1], dtype=dtype_of_gradient(x, into))
    for segment in range(segments):
        part = segment_of(dy if dim == 0 else x, 1, segment, segments)
        product = primitives.wgrad(part, whole) if dim == 0 else primitives.wgrad(whole, part)
        total.narrow(dim, segment * product.shape[dim], product.shape[dim]).add_(product)
    return None if isinstance(into, Tensor) else total


def row_blocks(rows: int, device: torch.device, segments: int) -> list[slice]:
    """Split rows into blocks of one call each, the same for every number of ranks."""
    if not torch_computes(device) or rows % segments or rows // segments < LEAST_ROWS:
        return [slice(0, rows)]
    size = rows // segments
    return [slice(start, start + size) for start in range(0, rows, size)]


def in_blocks(
    arriving: Iterable[tuple[slice, Tensor]], rows: int, segments: int
) -> Iterator[tuple[slice, Tensor]]:
    """Regroup rows that arrive in chunks of any size into blocks, each as soon as it is complete."""
    whole: Tensor | None = None
    missing: dict[int, int] = {}
    blocks: list[slice] = []
    for here, chunk in arriving:
        if whole is None:
            blocks = row_blocks(rows, chunk.device, segments)
            missing = {number: block.stop - block.start for number, block in enumerate(blocks)}
            whole = chunk if len(chunk) == rows else chunk.new_empty(rows, chunk.shape[1])
        if whole is not chunk:
            whole[here] = chunk
        for number in list(missing):
            missing[number] -= max(
                0, min(here.stop, blocks[number].stop) - max(here.start, blocks[number].start)
            )
            if not missing[number]:
                del missing[number]
                yield blocks[number], canonical(rows_of(whole, blocks[number]))


class Segmented(Plain):
    """Computes by a call for each segment, where torch computes."""

    is_plain = False

    def __init__(self, segments: int, own: int) -> None:
        """segments: of what ranks share; own: that this rank has of them"""
        self.segments, self._of_all = own, segments

    def terms(self, pairs: Sequence[Pair], transposed: bool, dtype: torch.dtype) -> Terms:
        """In fp32 or wider: they are rounded after the sum over ranks."""
        return SegmentSum(pairs, transposed, self.segments, self._of_all).terms(dtype)

    def wgrad(self, dy: Tensor, x: Tensor, into: Into, *, split: Direction) -> Tensor | None:
        calls = segment_calls(self.segments, x.device)
        return segmented_weight_gradient(canonical(dy), canonical(x), into, calls, dim=int(split == "x"))

    def bias_grad(self, dz: Tensor, *, split: bool) -> Tensor:
        calls = segment_calls(self.segments, dz.device) if split else 0
        return as_dtype(map_segments(calls, primitives.bias_grad, canonical(dz), dim=0), dz.dtype)

    def act_grad(self, dy: Tensor, z: Tensor, activation: Activation) -> Tensor:
        slope = partial(super().act_grad, activation=activation)
        return map_segments(segment_calls(self.segments, dy.device), slope, canonical(dy), z)

    def _blocks(self, rows: Gather, tokens: int) -> Iterable[tuple[slice, Tensor]]:
        return in_blocks(rows, tokens, self._of_all)

    def _product_into(
        self,
        out: Sequence[Tensor],
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        transposed: bool,
        activation: Activation,
        keep_z: bool,
        wait: Waiting,
    ) -> None:
        if transposed:
            split = Along(weight, 0), Along(bias, 0)
            self._compute(primitives.linear, columns(out), x, *split, activation, keep_z, wait=wait)
        else:
            self._compute(primitives.dgrad, columns(out), x, Along(weight, 1), wait=wait)

    def _compute(
        self,
        primitive: Callable[..., Any],
        out: Sequence[Along],
        x: Tensor,
        *args: Along | object,
        wait: Waiting,
    ) -> None:
        segments = segment_calls(self.segments, x.device)
        if not segments:
            super()._compute(primitive, out, x, *args, wait=wait)
            return
        x = canonical(x)
        for segment in range(segments):
            results = primitive(x, *(_cut(arg, segment, segments) for arg in args))
            results = (results,) if isinstance(results, Tensor) else results
            found = [result for result in results if result is not None]
            for whole, result in zip(out, found, strict=True):
                assert whole.tensor is not None, "what is written is there"
                width = result.shape[whole.dim]
                whole.tensor.narrow(whole.dim, segment * width, width).copy_(result)

    def _act_into(self, h: Tensor, z: Tensor, activation: Activation) -> None:
        calls = segment_calls(self.segments, z.device)
        if calls:
            h.copy_(map_segments(calls, partial(act_ref, activation=activation), z))
        else:
            super()._act_into(h, z, activation)


def _cut(arg: object, segment: int, segments: int) -> object:
    if isinstance(arg, Along):
        return None if arg.tensor is None else segment_of(arg.tensor, arg.dim, segment, segments)
    return arg


class SegmentSum:
    """This rank's terms of a sum over ranks, in fp32 or wider, computed by blocks when they are asked for."""

    def __init__(self, pairs: Sequence[Pair], transposed: bool, segments: int, of_all: int) -> None:
        self._pairs, self._transposed, self._segments = pairs, transposed, segments
        activations, weight = pairs[0]
        self.rows, self.cols = activations.shape[0], weight.shape[0 if transposed else 1]
        self.like = activations.new_empty(0, dtype=sums_dtype(activations.dtype))
        self._blocks = row_blocks(self.rows, activations.device, of_all)
        self._any_rows = not torch_computes(activations.device)
        self._sums: Tensor | None = None

    def __call__(self, rows: slice) -> Tensor:
        if self._any_rows:
            return self._computed(rows)
        if self._sums is None:
            self._sums = self.like.new_empty(self.rows, self.cols)
        needed = [block for block in self._blocks if block.start < rows.stop and rows.start < block.stop]
        for block in needed:
            self._blocks.remove(block)
            self._sums[block] = self._computed(block)
        return rows_of(self._sums, rows)

    def terms(self, dtype: torch.dtype) -> Terms:
        """Return them for a sum that is rounded to `dtype`."""
        return Terms(self.rows, self.cols, self.like, self, dtype, width=self.cols, tree=True)

    def _computed(self, rows: slice) -> Tensor:
        pairs = [(rows_of(a, rows), w) for a, w in self._pairs]
        return segment_sum(pairs, transposed=self._transposed, segments=self._segments)
