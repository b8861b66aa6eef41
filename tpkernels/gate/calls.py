"""How each launcher is called, beside its oracle: by the numeric gate on numbers, by the catalog on none.

A call makes its operands, and returns by name what the launcher computed and what the oracle says of the same
operands in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tpkernels.kernels import reference
from tpkernels.kernels.activations import Activation, Glu
from tpkernels.kernels.bias_grad import bias_grad
from tpkernels.kernels.cross_entropy import cross_entropy_grad, softmax_statistics
from tpkernels.kernels.dglu import dglu
from tpkernels.kernels.dgrad import dgrad, dgrad_act
from tpkernels.kernels.embedding import embedding_bwd, embedding_fwd
from tpkernels.kernels.gather_linear import gather_linear_fwd
from tpkernels.kernels.glu import glu_fwd
from tpkernels.kernels.linear import linear_fwd
from tpkernels.kernels.norm import layer_norm_bwd, layer_norm_fwd, rms_norm_bwd, rms_norm_fwd
from tpkernels.kernels.operands import Form
from tpkernels.kernels.reduce import reduce_slots
from tpkernels.kernels.tiles import MatmulTile, waiting_tile
from tpkernels.kernels.waits import Arrivals
from tpkernels.kernels.wgrad import wgrad, wgrad_accumulate_

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

    def vector(self, size: int, dtype: torch.dtype | None = None) -> Tensor:
        return self.matrix(1, size, dtype)[0]

    def weight(self) -> Tensor:
        return self.matrix(self.out_features, self.in_features).mul_(self.in_features**-0.5)

    def arrivals(self, chunks: int) -> Arrivals:
        """All chunks are here."""
        flags, awaited = (self.integers(count, 7, 8, torch.int32) for count in (chunks, 1))
        return Arrivals(flags, awaited, self.integers(1, 0, 1, torch.int32), spin_limit=1001)


def linear(of: Operands, activation: Activation, bias: bool = True) -> Results:
    T, K, N = of.sizes
    x, w, b = of.matrix(T, K), of.weight(), of.vector(N) if bias else None
    ours = linear_fwd(x, w, b, activation=activation, keep_z=True, tile=of.tile, form=of.form)
    y, z = reference.linear_ref(x.double(), w.double(), None if b is None else b.double(), activation)
    return {"y": (ours.y, y), "z": (ours.z, z)}


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
    y, z = reference.gather_linear_ref(x.double(), w.double(), b.double(), activation)
    return {"y": (ours.y, y), "z": (ours.z, z)}


def glu(of: Operands, kind: Glu, keep_gu: bool = True) -> Results:
    x, w_gate, w_up = of.matrix(of.tokens, of.in_features), of.weight(), of.weight()
    ours = glu_fwd(x, w_gate, w_up, kind=kind, keep_gu=keep_gu, tile=of.tile, form=of.form)
    h, g, u = reference.glu_ref(x.double(), w_gate.double(), w_up.double(), kind)
    return {"h": (ours.h, h), "g": (ours.g, g), "u": (ours.u, u)}


def input_grad(of: Operands) -> Results:
    dy, w = of.matrix(of.tokens, of.out_features), of.weight()
    dx = dgrad(dy, w, tile=of.tile, form=of.form)
    return {"dx": (dx, reference.dgrad_ref(dy.double(), w.double()))}


def input_grad_act(of: Operands, activation: Activation, bias_grad: bool = True) -> Results:
    T, K, N = of.sizes
    dy, w, z = of.matrix(T, N), of.weight(), of.matrix(T, K)
    ours = dgrad_act(dy, w, z, activation, bias_grad=bias_grad, tile=of.tile, form=of.form)
    dz, db = reference.dgrad_act_ref(dy.double(), w.double(), z.double(), activation)
    return {"dz": (ours.dz, dz), "db": (ours.db, db)}


def glu_grad(of: Operands, kind: Glu) -> Results:
    T, K, N = of.sizes
    dy, w, g, u = of.matrix(T, N), of.weight(), of.matrix(T, K), of.matrix(T, K)
    ours = dglu(dy, w, g, u, kind=kind, emit_h=True, tile=of.tile, form=of.form)
    dg, du, h = reference.dglu_ref(dy.double(), w.double(), g.double(), u.double(), kind)
    return {"dg": (ours.dg, dg), "du": (ours.du, du), "h": (ours.h, h)}


def weight_grad(of: Operands, dtype: torch.dtype | None = None) -> Results:
    dy, x = of.matrix(of.tokens, of.out_features), of.matrix(of.tokens, of.in_features)
    dw = wgrad(dy, x, dtype=dtype, tile=of.tile, form=of.form)
    return {"dw": (dw, reference.wgrad_ref(dy.double(), x.double()))}


def weight_grad_accumulated(of: Operands, dtype: torch.dtype) -> Results:
    T, K, N = of.sizes
    dy, x, main_grad = of.matrix(T, N), of.matrix(T, K), of.matrix(N, K, dtype)
    exact = main_grad.double()
    reference.wgrad_accumulate_ref_(exact, dy.double(), x.double())
    wgrad_accumulate_(main_grad, dy, x, tile=of.tile, form=of.form)
    return {"main_grad": (main_grad, exact)}


def row_sums(of: Operands, launcher: Callable[[Tensor], Tensor] = bias_grad) -> Results:
    dy = of.matrix(of.tokens, of.in_features)
    return {"db": (launcher(dy), reference.bias_grad_ref(dy.double()))}


def slot_sums(of: Operands, wait: bool = True) -> Results:
    """Three slots, each of which arrives in two parts; the flags before theirs are of others."""
    rows = of.tokens // 2 * 2
    slots = of.matrix(3 * rows, of.in_features).unflatten(0, (3, rows))
    bias = of.vector(of.in_features)
    arrivals, chunks = (of.arrivals(5 + 6), range(5, 5 + 6)) if wait else (None, None)
    y = reduce_slots(slots, bias, arrivals=arrivals, chunks=chunks)
    return {"y": (y, reference.reduce_slots_ref(slots.double(), bias.double()))}


def rms_norm(of: Operands, residual: bool = True) -> Results:
    x, added, dy, past, weight = _norm_operands(of, residual)
    ours = rms_norm_fwd(x, weight, residual=added)
    grads = rms_norm_bwd(dy, ours.summed, weight, ours.rstd, dsummed=past)
    s, w = ours.summed.double(), weight.double()  # the rounded sum is what the rest is computed from
    y, _, rstd = reference.rms_norm_ref(s, w)
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
    y, _, mean, rstd = reference.layer_norm_ref(s, w, bias.double())
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
    return {
        "y": (
            embedding_fwd(ids, weight, first_id=first_id),
            reference.embedding_ref(ids, weight.double(), first_id),
        ),
        "dweight": (
            embedding_bwd(dy, ids, rows=rows, first_id=first_id),
            reference.embedding_bwd_ref(dy.double(), ids, rows, first_id),
        ),
    }


def cross_entropy(of: Operands) -> Results:
    """One of three ranks, with some padding and ignored rows."""
    T, _, N = of.sizes
    columns, first_id = N - 7, N - 3
    logits, dloss, target = of.matrix(T, N), of.vector(T, torch.float32), of.integers(T, -20, 3 * N)
    logits[:, columns:] = float("nan")
    ours = softmax_statistics(logits, target, columns=columns, first_id=first_id)
    exact = reference.softmax_statistics_ref(logits.double(), target, columns, first_id)
    exact[0].clamp_(min=torch.finfo(torch.float32).min)
    grad = cross_entropy_grad(
        *(logits, target, ours[0], ours[1] + 1, dloss),
        columns=columns,
        first_id=first_id,
        on_target=0.9,
        off_target=0.001,
    )
    exact_grad = reference.cross_entropy_grad_ref(
        *(logits.double(), target, exact[0], exact[1] + 1, dloss.double()), columns, first_id, 0.9, 0.001
    )
    names = ("maximum", "total", "picked", "summed")
    statistics = {name: (ours[row], exact[row]) for row, name in enumerate(names)}
    return {**statistics, "dlogits": (grad, exact_grad)}
