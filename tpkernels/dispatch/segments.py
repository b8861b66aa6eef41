"""Products whose depth is split over ranks, so that their sums have the same bits at every number of ranks.

The depth of this rank is cut into equal segments. The product of each is accumulated in fp32 or wider, by the
same call whatever else the rank has. Products are added in a tree: see `tp_invariance`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tpkernels.dispatch import backends
from tpkernels.dispatch.products import sums_dtype
from tpkernels.dispatch.record import launcher
from tpkernels.tp_invariance import tree_sum

Pair = tuple[Tensor, Tensor]  # activations (tokens, depth), and a weight (cols, depth) or (depth, cols)
_by_kernel = launcher("segments", "segment_sum", "transposed", "segments")
_LINE = 64  # bytes: libraries may add in another order where memory begins elsewhere


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
