"""How each launcher is called, beside its oracle: by the numeric gate on numbers, by the catalog on none.

A call makes its operands, and returns by name what the launcher computed and what the oracle says of the same
operands in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from inspect import signature
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from tpkernels.dispatch.primitives import RECORDS
from tpkernels.dispatch.products import PRODUCTS
from tpkernels.dispatch.record import Layer
from tpkernels.kernels import launch, reference
from tpkernels.kernels.activations import Activation, Glu
from tpkernels.kernels.bias_grad import bias_grad
from tpkernels.kernels.cross_entropy import cross_entropy_grad, softmax_statistics
from tpkernels.kernels.dgrad import dgrad
from tpkernels.kernels.dgrad_pairs import dgrad_pairs
from tpkernels.kernels.embedding import embedding_bwd, embedding_fwd
from tpkernels.kernels.flags import advance as count_call
from tpkernels.kernels.flags import publish as raise_flags
from tpkernels.kernels.gather_linear import gather_linear_fwd
from tpkernels.kernels.linear import linear_fwd
from tpkernels.kernels.norm import layer_norm_bwd, layer_norm_fwd, rms_norm_bwd, rms_norm_fwd
from tpkernels.kernels.operands import Form
from tpkernels.kernels.recipe import Format, Scaling
from tpkernels.kernels.reduce import add_slots, reduce_slots
from tpkernels.kernels.scaled import Scaled
from tpkernels.kernels.scatter_linear import scatter_linear as store_product
from tpkernels.kernels.segments import segment_sum
from tpkernels.kernels.tiles import MatmulTile, waiting_tile
from tpkernels.kernels.waits import Arrivals, Departures

Results = Mapping[str, tuple[Tensor | None, Tensor]]  # what -> (computed, exact)


@dataclass(frozen=True, slots=True)
class Operands:
    """Makes the operands of a call."""

    dtype: torch.dtype
    tokens: int
    in_features: int
    out_features: int
    chunks: int  # that the tokens arrive in
    form: Form | None = None  # of a matmul, like the tile
    tile: MatmulTile | None = None

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.tokens, self.in_features, self.out_features

    def matrix(self, rows: int, cols: int, dtype: torch.dtype | None = None) -> Tensor:
        raise NotImplementedError

    def integers(self, count: int, low: int, high: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """From low to high - 1."""
        raise NotImplementedError

    def scaled(
        self, rows: int, features: int, format: Format, scaling: Scaling, square: bool = False
    ) -> Scaled:
        """In fp8. square: a weight, whose scales, where they are of blocks, are of 128 x 128"""
        raise NotImplementedError

    def vector(self, size: int, dtype: torch.dtype | None = None) -> Tensor:
        return self.matrix(1, size, dtype)[0]

    def weight(self) -> Tensor:
        return self.matrix(self.out_features, self.in_features).mul_(self.in_features**-0.5)

    def like(self, name: str, value: Any) -> Any:
        """An operand of that name in the place of a sample's; what is no tensor stays."""
        if not isinstance(value, Tensor):
            return value
        if value.ndim == 1:
            return self.vector(*value.shape)
        return self.weight() if name.startswith("w") else self.matrix(*value.shape)

    def word(self, value: int) -> Tensor:
        return self.integers(1, value, value + 1, torch.int32)

    def addresses(self, *tensors: Tensor) -> Tensor:
        """A table for kernels that write to other ranks."""
        return torch.tensor([tensor.data_ptr() for tensor in tensors], device=tensors[0].device)

    def arrivals(self, chunks: int) -> Arrivals:
        """All chunks are here."""
        return Arrivals(self.integers(chunks, 7, 8, torch.int32), self.word(7), self.word(0), spin_limit=1001)


# the name of the result, where there is one
_RESULT = {"dgrad": "dx", "dgrad_pairs": "dx", "wgrad": "dw", "wgrad_accumulate_": "main_grad"}


def product(
    of: Operands,
    name: str,
    activation: Activation = "none",
    glu: Glu = "swiglu",
    optional: bool = True,
    into: torch.dtype | None = None,
) -> Results:
    """A primitive of `PRODUCTS`, by its record: its sample, its kernel, and as oracle its torch form.

    optional: with bias, bias gradient and what is kept for backward
    into: the dtype of the result of the weight gradients
    """
    record = PRODUCTS[name]
    layer = Layer(of.tokens, of.out_features, of.in_features, of.dtype, activation, glu, optional, optional)
    sample = signature(record.by_torch).bind(*record.sample(layer)).arguments
    operands = [of.like(word, value) for word, value in sample.items()]
    if record.changes_first:
        rows, cols = operands[0].shape
        operands[0] = of.matrix(rows, cols, into)
    exact = [value.double() if isinstance(value, Tensor) else value for value in operands]
    dtype = {"dtype": into} if into and not record.changes_first else {}
    ours = record.by_kernel(*operands, tile=of.tile, form=of.form, **dtype)
    truth = (record.oracle or record.by_torch)(*exact)
    if record.changes_first:
        ours, truth = operands[0], exact[0]
    if isinstance(ours, Tensor):
        return {_RESULT[name]: (ours, truth)}
    pairs = zip(ours._fields, ours, truth, strict=True)
    return {word: (computed, one) for word, computed, one in pairs if one is not None}


# called with options that no primitive has yet: residuals, ids of other ranks, padding
CALLED_BELOW = (
    "bias_grad",
    "rms_norm",
    "rms_norm_grad",
    "layer_norm",
    "layer_norm_grad",
    "lookup",
    "lookup_grad",
    "softmax_statistics",
    "cross_entropy_grad",
    *("quantize", "quantize_act", "quantize_glu", "dequantize", "scaled_linear"),  # in `scaled`
)


def other_primitives() -> list[str]:
    """Names of those that are neither products nor called below."""
    return [name for name in RECORDS if name not in (*PRODUCTS, *CALLED_BELOW)]


def primitive(of: Operands, name: str) -> Results:
    """One without tiles, by its record."""
    record = RECORDS[name]
    layer = Layer(of.tokens, of.out_features, of.in_features, of.dtype)
    sample = signature(record.by_torch).bind(*record.sample(layer)).arguments
    operands = [of.like(word, value) for word, value in sample.items()]
    exact = [value.double() if isinstance(value, Tensor) else value for value in operands]
    ours, truth = record.by_kernel(*operands), (record.oracle or record.by_torch)(*exact)
    if isinstance(ours, Tensor):
        ours, truth = (ours,), (truth,)
    return {f"result {i}": pair for i, pair in enumerate(zip(ours, truth, strict=True))}


def product_in_fp32(of: Operands, name: str) -> Results:
    """A product of 16-bit operands that is written in fp32, to be added to others."""
    T, K, N = of.sizes
    (cols, depth), pairs = (N, K) if name == "linear" else (K, N), 2 if name == "dgrad_pairs" else 1
    given = [(of.matrix(T, depth), of.weight()) for _ in range(pairs)]
    out = launch.empty((T, cols), torch.float32, given[0][0].device)
    launchers: Mapping[str, Callable[..., object]] = {
        "linear": linear_fwd,
        "dgrad": dgrad,
        "dgrad_pairs": dgrad_pairs,
    }
    launchers[name](*chain(*given), out=out, tile=of.tile, form=of.form)
    exact = [a.double() @ (w.double().t() if name == "linear" else w.double()) for a, w in given]
    return {"sum": (out, torch.stack(exact).sum(0))}


def segments(of: Operands, transposed: bool, pairs: int) -> Results:
    """A product of a rank whose depth is two segments."""
    T, K, N = of.sizes
    depth, cols = K // 16 * 16, N  # half of it lies in whole 16-byte units
    given = [
        (of.matrix(T, depth), of.matrix(*(cols, depth) if transposed else (depth, cols)))
        for _ in range(pairs)
    ]
    ours = segment_sum(given, transposed=transposed, segments=2)
    exact = [a.double() @ (w.double().t() if transposed else w.double()) for a, w in given]
    return {"sum": (ours, torch.stack(exact).sum(0))}


def gather_linear(of: Operands, activation: Activation) -> Results:
    T, K, N = of.sizes
    chunk_rows = T // of.chunks
    x, w, b = of.matrix(chunk_rows * of.chunks, K), of.weight(), of.vector(N)
    ours = gather_linear_fwd(
        x,
        w,
        b,
        arrivals=of.arrivals(of.chunks),
        first_row=chunk_rows,
        activation=activation,
        keep_z=True,
        tile=of.tile and waiting_tile(of.tile, chunk_rows),
        form=of.form,
    )
    y, z = reference.linear_ref(x.double(), w.double(), b.double(), activation, True)
    return {"y": (ours.y, y), "z": (ours.z, z)}


def gather_dgrad(of: Operands) -> Results:
    """The product with a weight that lies as (depth, cols): dgrad, computed as dy arrives."""
    chunk_rows = of.tokens // of.chunks
    dy, w = of.matrix(chunk_rows * of.chunks, of.out_features), of.weight()
    tile = of.tile and waiting_tile(of.tile, chunk_rows)
    ours = gather_linear_fwd(dy, w.t(), arrivals=of.arrivals(of.chunks), tile=tile, form=of.form)
    return {"dx": (ours.y, reference.dgrad_ref(dy.double(), w.double()))}


def scatter_linear(of: Operands, pairs: int = 1, depth_first: bool = False) -> Results:
    """The second of two ranks, each of which gets its rows in as many chunks as there are.

    depth_first: the product is a dgrad, whose weight lies as (depth, cols)
    """
    T, K, N = of.sizes
    rows, cols, depth = T // (2 * of.chunks) * of.chunks, *((K, N) if depth_first else (N, K))
    given = [(of.matrix(2 * rows, depth), of.weight()) for _ in range(pairs)]
    given = [(a, w.t() if depth_first else w) for a, w in given]
    slots = [launch.empty((rows, cols), of.dtype, given[0][0].device) for _ in range(2)]
    flags = [of.integers(of.chunks, 0, 7, torch.int32) for _ in range(2)]
    counters = of.integers(2 * of.chunks, 0, 1, torch.int32)
    store_product(
        tuple(given),
        departures=Departures(of.addresses(*slots), of.addresses(*flags), counters, of.word(7)),
        ranks=2,
        rank=1,
        splits=of.chunks,
        tile=of.tile and replace(of.tile, flatten=False),
        form=of.form,
    )
    exact = torch.stack([a.double() @ w.double().t() for a, w in given]).sum(0)
    return {
        "product": (torch.cat(slots), exact),
        "flags": _words(*flags, *[7] * (2 * of.chunks)),
        "counters": _words(counters, *[0] * (2 * of.chunks)),
    }


def publish(of: Operands) -> Results:
    flags = of.integers(4, 7, 8, torch.int32)
    raise_flags(of.addresses(flags[1:], flags[3:]), of.word(9))
    return {"flags": _words(flags, 7, 9, 7, 9)}


def advance(of: Operands) -> Results:
    word, awaited = of.word(32), of.word(7)
    count_call(word, awaited, 16, 3)
    return {"word": _words(word, 48), "awaited": _words(awaited, 51)}


def _words(*found: Tensor | int) -> tuple[Tensor, Tensor]:
    """Integers that were found, then those that are expected."""
    tensors = [one for one in found if isinstance(one, Tensor)]
    return torch.cat(tensors).float(), torch.tensor([one for one in found if isinstance(one, int)]).double()


def row_sums(of: Operands, launcher: Callable[[Tensor], Tensor] = bias_grad) -> Results:
    dy = of.matrix(of.tokens, of.in_features)
    return {"db": (launcher(dy), reference.bias_grad_ref(dy.double()))}


def slot_sums(of: Operands, wait: bool = True, slots: int = 3, tree: bool = False) -> Results:
    """So many slots, each of which arrives in two parts; the flags before theirs are of others."""
    rows = of.tokens // 2 * 2
    given = of.matrix(slots * rows, of.in_features).unflatten(0, (slots, rows))
    bias = of.vector(of.in_features)
    arrivals, chunks = (of.arrivals(5 + 2 * slots), range(5, 5 + 2 * slots)) if wait else (None, None)
    y = reduce_slots(given, bias, arrivals=arrivals, chunks=chunks, tree=tree)
    return {"y": (y, reference.reduce_slots_ref(given.double(), bias.double(), tree=tree))}


def added_slots(of: Operands, into: torch.dtype, accumulate: bool) -> Results:
    """The sums of three parts of a product."""
    rows, cols = of.tokens, of.in_features
    slots = of.matrix(3 * rows, cols, torch.float32).unflatten(0, (3, rows))
    y = of.matrix(rows, cols, into)
    before = y.double()
    add_slots(y, slots, accumulate=accumulate)
    return {"y": (y, reference.reduce_slots_ref(slots.double()) + (before if accumulate else 0))}


def rms_norm(of: Operands, residual: bool = True) -> Results:
    x, added, dy, past, weight = _norm_operands(of, residual)
    ours = rms_norm_fwd(x, weight, residual=added)
    grads = rms_norm_bwd(dy, ours.summed, weight, ours.rstd, dsummed=past)
    s, w = ours.summed.double(), weight.double()  # the rounded sum is what the rest is computed from
    y, rstd = reference.rms_norm_ref(s, w)
    dx, dweight = reference.rms_norm_bwd_ref(dy.double(), s, w, rstd, past.double())
    return {
        "summed": (ours.summed, x.double() if added is None else x.double() + added.double()),
        "y": (ours.y, y),
        "rstd": (ours.rstd, rstd),
        "dx": (grads.dx, dx),
        "dweight": (grads.dweight, dweight),
    }


def layer_norm(of: Operands, residual: bool = True) -> Results:
    x, added, dy, past, weight = _norm_operands(of, residual)
    bias = of.vector(of.in_features)
    ours = layer_norm_fwd(x, weight, bias, residual=added)
    assert ours.mean is not None
    grads = layer_norm_bwd(dy, ours.summed, weight, ours.mean, ours.rstd, dsummed=past)
    s, w = ours.summed.double(), weight.double()
    y, mean, rstd = reference.layer_norm_ref(s, w, bias.double())
    dx, dweight, dbias = reference.layer_norm_bwd_ref(dy.double(), s, w, mean, rstd, past.double())
    return {
        "summed": (ours.summed, x.double() if added is None else x.double() + added.double()),
        "y": (ours.y, y),
        "mean": (ours.mean, mean),
        "rstd": (ours.rstd, rstd),
        "dx": (grads.dx, dx),
        "dweight": (grads.dweight, dweight),
        "dbias": (grads.dbias, dbias),
    }


def _norm_operands(of: Operands, residual: bool) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]:
    """x, residual, dy, the gradient that reaches the sum past the norm, and the weight."""
    x, added, dy, past = (of.matrix(of.tokens, of.in_features) for _ in range(4))
    return x.add_(0.5), added if residual else None, dy, past, of.vector(of.in_features)


def embedding(of: Operands) -> Results:
    """One of three ranks, with ids of the others before and after its own."""
    T, K, N = of.sizes
    rows = N // 4
    first_id = rows - 3
    weight, dy, ids = of.matrix(rows, K), of.matrix(T, K), of.integers(T, 0, 3 * rows)
    y = embedding_fwd(ids, weight, first_id=first_id)
    dweight = embedding_bwd(dy, ids, rows=rows, first_id=first_id)
    return {
        "y": (y, reference.embedding_ref(ids, weight.double(), first_id)),
        "dweight": (dweight, reference.embedding_bwd_ref(dy.double(), ids, rows, first_id)),
    }


def cross_entropy(of: Operands) -> Results:
    """One of three ranks, with some padding and ignored rows."""
    T, _, N = of.sizes
    columns, first_id = N - 7, N - 3
    logits, dloss, target = of.matrix(T, N), of.vector(T, torch.float32), of.integers(T, -20, 3 * N)
    logits[:, columns:] = float("nan")
    ours = softmax_statistics(logits, target, columns=columns, first_id=first_id)
    grad = cross_entropy_grad(
        *(logits, target, ours[0], ours[1].clone().add_(1), dloss),  # + 1 on the meta device imports dynamo
        columns=columns,
        first_id=first_id,
        on_target=0.9,
        off_target=0.001,
    )
    exact = reference.softmax_statistics_ref(logits.double(), target, columns, first_id)
    exact[0].clamp_(min=torch.finfo(torch.float32).min)
    exact_grad = reference.cross_entropy_grad_ref(
        *(logits.double(), target, exact[0], exact[1] + 1, dloss.double()), columns, first_id, 0.9, 0.001
    )
    names = ("maximum", "total", "picked", "summed")
    statistics = {name: (ours[row], exact[row]) for row, name in enumerate(names)}
    return {**statistics, "dlogits": (grad, exact_grad)}
