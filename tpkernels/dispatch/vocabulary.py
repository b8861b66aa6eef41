"""Embeddings and losses, as primitives and their records.

T tokens, V columns or rows of this rank, H features. Ids are of the full vocabulary; first_id is that of this
rank's first row or column. All are bound by memory, and plain torch passes over the logits several times
where a kernel does once, so nothing is timed.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tpkernels.dispatch.primitives import primitive, primitive_in_place
from tpkernels.dispatch.products import sums_dtype
from tpkernels.dispatch.record import Layer, Primitive, launcher
from tpkernels.kernels.operands import DTYPES
from tpkernels.kernels.reference import (
    cross_entropy_grad_ref,
    embedding_bwd_ref,
    embedding_ref,
    softmax_statistics_ref,
)


def _rows(layer: Layer) -> tuple[int, int]:
    """How many rows of a table a rank has, and the id of the first; other ranks have ids on both sides."""
    rows = max(1, layer.out_features // 4)
    return rows, max(0, rows - 3)


def _ids(layer: Layer) -> Tensor:
    return layer.integers(layer.tokens, 0, 3 * _rows(layer)[0])


def _lookup_sample(layer: Layer) -> tuple[Any, ...]:
    rows, first_id = _rows(layer)
    return _ids(layer), layer.weight()[:rows], first_id


# (T, H): rows of the table, zeros for ids of other ranks
lookup = primitive(
    Primitive(
        "lookup(Tensor ids, Tensor weight, SymInt first_id) -> rows",
        embedding_ref,
        launcher("embedding", "embedding_fwd", "first_id"),
        _lookup_sample,
        lambda ids, weight, first_id: weight.dtype in DTYPES,
        fake=lambda ids, weight, first_id: weight.new_empty(ids.shape[0], weight.shape[1]),
    )
)


# (rows, H): the gradient of this rank's shard of the table
lookup_grad = primitive(
    Primitive(
        "lookup_grad(Tensor dy, Tensor ids, SymInt rows, SymInt first_id, ScalarType dtype) -> dweight",
        embedding_bwd_ref,
        launcher("embedding", "embedding_bwd", "rows", "first_id", "dtype"),
        lambda layer: (layer.x(), _ids(layer), *_rows(layer), layer.dtype),
        lambda dy, *_: dy.dtype in DTYPES,
        fake=lambda dy, ids, rows, first_id, dtype: dy.new_empty(rows, dy.shape[1], dtype=dtype),
    )
)


# (4, T): maximum, total, picked and summed of each row, of its first `columns`; with a scale weighted
softmax_statistics = primitive(
    Primitive(
        "softmax_statistics(Tensor logits, Tensor target, SymInt columns, SymInt first_id, float? scale) "
        "-> statistics",
        softmax_statistics_ref,
        launcher("cross_entropy", "softmax_statistics", "columns", "first_id", "scale"),
        lambda layer: (layer.dy(), _ids(layer), layer.out_features, 0, None),
        lambda logits, *_: logits.dtype in DTYPES,
        fake=lambda logits, *_: logits.new_empty(4, logits.shape[0], dtype=sums_dtype(logits.dtype)),
    )
)


def _cross_entropy_grad_sample(layer: Layer) -> tuple[Any, ...]:
    rows = (layer.tensor(layer.tokens, dtype=sums_dtype(layer.dtype)) for _ in range(3))
    return layer.dy(), _ids(layer), *rows, layer.out_features, 0, 1.0, 0.0, False, None, None, None


# (T, V): the gradient of the logits; in their memory if `in_place`
cross_entropy_grad = primitive_in_place(
    Primitive(
        "cross_entropy_grad(Tensor(a!) logits, Tensor target, Tensor maximum, Tensor total, Tensor dloss, "
        "SymInt columns, SymInt first_id, float on_target, float off_target, bool in_place, float? scale, "
        "Tensor? mean, Tensor? dentropy) -> dlogits",
        cross_entropy_grad_ref,
        launcher(
            "cross_entropy",
            "cross_entropy_grad",
            *("columns", "first_id", "on_target", "off_target", "in_place", "scale", "mean", "dentropy"),
        ),
        _cross_entropy_grad_sample,
        lambda logits, *_: logits.dtype in DTYPES,
    )
)
