"""How an op computes under TP-invariance: results have the same bits at every number of ranks.

Torch's libraries choose their algorithms by sizes. So each call to torch takes one segment of what ranks
share, and one block of rows: sizes that do not depend on the number of ranks. Our kernels compute an element
alike wherever it lies, and take everything at once. See `tp_invariance`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tpkernels.comm.transports.rows import Gather, Terms
from tpkernels.dispatch import backends, primitives
from tpkernels.dispatch.products import sums_dtype
from tpkernels.dispatch.record import launcher
from tpkernels.kernels.activations import Activation, act_grad_ref, act_ref
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


def row_blocks(rows: int, device: torch.device, segments: int) -> list[slice]:
    """Split rows into blocks of one call each, the same for every number of ranks."""
    if not torch_computes(device) or rows % segments or rows // segments < LEAST_ROWS:
        return [slice(0, rows)]
    size = rows // segments
    return [slice(start, start + size) for start in range(0, rows, size)]


class Segmented(Plain):
    """Computes by a call for each segment, where torch computes."""

    is_plain = False

    def __init__(self, segments: int, own: int) -> None:
        """segments: of what ranks share; own: that this rank has of them"""
        self.segments, self._of_all = own, segments

    def terms(self, pairs: Sequence[Pair], transposed: bool, dtype: torch.dtype) -> Terms:
        """In fp32 or wider: they are rounded after the sum over ranks."""
        first, weight = pairs[0]
        rows, cols = first.shape[0], weight.shape[0 if transposed else 1]
        like = first.new_empty(0, dtype=sums_dtype(first.dtype))
        compute: Callable[[slice], Tensor] = partial(_sum_of_rows, pairs, transposed, self.segments)
        if torch_computes(first.device):
            blocks = row_blocks(rows, first.device, self._of_all)
            compute = InBlocks(compute, blocks, like.new_empty(rows, cols))
        return Terms(rows, cols, like, compute, dtype, width=cols, tree=True)

    def wgrad(self, dy: Tensor, x: Tensor, into: Into, *, split: Direction) -> Tensor | None:
        dy, x = canonical(dy), canonical(x)
        if not torch_computes(x.device):
            return weight_gradient(dy, x, into)
        total = into if isinstance(into, Tensor) else None
        if total is None:
            total = x.new_zeros(dy.shape[1], x.shape[1], dtype=dtype_of_gradient(x, into))
        dim = int(split == "x")  # rows of the result are split over ranks as dy is, its columns as x
        for segment in range(self.segments):
            part = segment_of(x if dim else dy, 1, segment, self.segments)
            product = primitives.wgrad(dy, part) if dim else primitives.wgrad(part, x)
            total.narrow(dim, segment * product.shape[dim], product.shape[dim]).add_(product)
        return None if isinstance(into, Tensor) else total

    def bias_grad(self, dz: Tensor, *, split: bool) -> Tensor:
        if not split or not torch_computes(dz.device):
            return super().bias_grad(canonical(dz), split=split)
        db = dz.new_empty(dz.shape[1])
        self._by_segment(primitives.bias_grad, [Along(db, 0)], Along(canonical(dz), 1))
        return db

    def act_grad(self, dy: Tensor, z: Tensor, activation: Activation) -> Tensor:
        if not torch_computes(dy.device):
            return super().act_grad(canonical(dy), z, activation)
        dz = torch.empty_like(dy, memory_format=torch.contiguous_format)
        self._by_segment(act_grad_ref, columns([dz]), *columns([canonical(dy), z]), activation)
        return dz

    def _act_into(self, h: Tensor, z: Tensor, activation: Activation) -> None:
        if torch_computes(z.device):
            self._by_segment(act_ref, columns([h]), *columns([z]), activation)
        else:
            super()._act_into(h, z, activation)

    def _blocks(self, rows: Gather, tokens: int) -> Iterator[tuple[slice, Tensor]]:
        """Regroup rows that arrive in chunks of any size into blocks, each as soon as it is complete."""
        whole: Tensor | None = None
        missing: dict[int, int] = {}
        blocks: list[slice] = []
        for here, chunk in rows:
            if whole is None:
                blocks = row_blocks(tokens, chunk.device, self._of_all)
                missing = {number: block.stop - block.start for number, block in enumerate(blocks)}
                whole = chunk if len(chunk) == tokens else chunk.new_empty(tokens, chunk.shape[1])
            if whole is not chunk:
                whole[here] = chunk
            for number in list(missing):
                block = blocks[number]
                missing[number] -= max(0, min(here.stop, block.stop) - max(here.start, block.start))
                if not missing[number]:
                    del missing[number]
                    yield block, canonical(rows_of(whole, block))

    def _compute(
        self,
        primitive: Callable[..., Any],
        out: Sequence[Along],
        x: Tensor,
        *args: Along | object,
        wait: Waiting,
    ) -> None:
        if torch_computes(x.device):
            self._by_segment(primitive, out, canonical(x), *args)
        else:
            super()._compute(primitive, out, x, *args, wait=wait)

    def _by_segment(self, compute: Callable[..., Any], out: Sequence[Along], *args: Along | object) -> None:
        """Compute each segment of `out`, of this segment of the args that ranks share."""
        for segment in range(self.segments):
            results = compute(*(_cut(arg, segment, self.segments) for arg in args))
            results = (results,) if isinstance(results, Tensor) else results
            found = [result for result in results if result is not None]
            for whole, result in zip(out, found, strict=True):
                assert whole.tensor is not None, "what is written is there"
                width = result.shape[whole.dim]
                whole.tensor.narrow(whole.dim, segment * width, width).copy_(result)


def _cut(arg: object, segment: int, segments: int) -> object:
    if isinstance(arg, Along):
        return None if arg.tensor is None else segment_of(arg.tensor, arg.dim, segment, segments)
    return arg


class InBlocks:
    """Rows that are computed in blocks, each when the first of its rows is asked for."""

    def __init__(self, compute: Callable[[slice], Tensor], blocks: list[slice], full: Tensor) -> None:
        self._compute, self._blocks, self._full = compute, blocks, full

    def __call__(self, rows: slice) -> Tensor:
        needed = [block for block in self._blocks if block.start < rows.stop and rows.start < block.stop]
        for block in needed:
            self._blocks.remove(block)
            self._full[block] = self._compute(block)
        return rows_of(self._full, rows)


def _sum_of_rows(pairs: Sequence[Pair], transposed: bool, segments: int, rows: slice) -> Tensor:
    some = [(rows_of(a, rows), w) for a, w in pairs]
    return segment_sum(some, transposed=transposed, segments=segments)
