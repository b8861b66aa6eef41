"""How an op computes: each op is written once, and one of three strategies computes its steps.

    Plain       operands as they are; an activation is computed with the product before it
    Segmented   the same in calls of fixed sizes, for TP-invariance: see `tensor_parallel.segments`
    Quantized   products of operands in fp8: see `quantized.products`

An operand is a matrix as products take it; ranks send each other rows of one tensor of it. A product is x wᵀ,
or dy w if `transposed` is False. Its width is split over ranks if rows are gathered before it, its depth if a
sum over ranks follows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from tpkernels.dispatch import primitives
from tpkernels.dispatch.products import sums_dtype
from tpkernels.kernels.activations import Activation, Glu, act_grad_ref, act_into
from tpkernels.ops.inputs import as_dtype
from tpkernels.ops.main_grad import Into, weight_gradient

Operand = Any  # a tensor, or what else a strategy makes of it
Pair = tuple[Tensor, Tensor]  # activations (tokens, depth), and a weight (cols, depth) or (depth, cols)
KeptRows = Literal["none", "own", "all"]
WaitingProduct = Callable[..., tuple[Tensor, Tensor | None]]  # y, and z if it is kept
ComputeRows = Callable[[slice, Operand, list[Tensor]], object]  # the range of rows, these rows, and outputs


class Along(NamedTuple):
    """A tensor, and the dimension along which ranks have shards of it."""

    tensor: Tensor | None
    dim: int


class Gathered(Protocol):
    """Rows of an operand from all ranks; some may be in flight: `layout.GatheredRows`."""

    def each(self, widths: Sequence[int], compute: ComputeRows) -> list[Tensor]: ...

    def products(
        self,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        activation: Activation = "none",
        keep_z: bool = False,
    ) -> list[Tensor]: ...

    def product(self, weight: Tensor) -> Tensor: ...


class Terms(Protocol):
    """A rank's terms of a sum over ranks, (rows, cols), computed on demand.

    Called with a range of rows; the result may be overwritten.
    """

    @property
    def rows(self) -> int: ...

    @property
    def cols(self) -> int: ...

    @property
    def like(self) -> Tensor:
        """A tensor of the dtype and device of what is sent."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the sum."""

    def __call__(self, rows: slice) -> Tensor:
        """Compute the terms of some rows."""

    def alone(self, bias: Tensor | None) -> Tensor:
        """Compute the sum of a group of one rank, plus bias."""


class ProductSum:
    """Terms that are a sum of products, computed by `product_sum`."""

    def __init__(self, pairs: Sequence[Pair], transposed: bool) -> None:
        self.pairs, self.transposed = pairs, transposed
        self.like, weight = pairs[0]
        self.rows, self.cols = self.like.shape[0], weight.shape[0 if transposed else 1]
        self.dtype = self.like.dtype

    def __call__(self, rows: slice) -> Tensor:
        if self.transposed:  # of one pair
            return product_sum([(rows_of(self.like, rows), self.pairs[0][1])], transposed=True)
        return product_sum([(rows_of(a, rows), w) for a, w in self.pairs], transposed=False)

    def alone(self, bias: Tensor | None) -> Tensor:
        if self.transposed:  # the product adds the bias
            return primitives.linear(*self.pairs[0], bias, "none", False)[0]
        assert bias is None, "gradients have no bias"
        return product_sum(self.pairs, transposed=False)

    def as_linear(self) -> tuple[Pair, ...]:
        """Return the pairs with weights as `linear` takes them, (cols, depth)."""
        return tuple((a, w if self.transposed else w.t()) for a, w in self.pairs)


def product_sum(pairs: Sequence[Pair], *, transposed: bool) -> Tensor:
    """Compute a wᵀ if transposed, else Σ a w over the pairs, two at a time in one accumulator."""
    (a, w), *others = pairs
    if transposed:
        assert not others, "only gradients add up products"
        return primitives.linear(a, w, None, "none", False)[0]
    if not others:
        return primitives.dgrad(a, w)
    total = primitives.dgrad_pairs(a, w, *others[0])
    return total.add_(product_sum(others[1:], transposed=False)) if others[1:] else total


def rows_of(tensor: Tensor, rows: slice) -> Tensor:
    """Return tensor[rows], without indexing if that is all of it."""
    return tensor if rows.stop - rows.start == tensor.shape[0] else tensor[rows]


class Plain:
    """Computes in the dtype of the operands."""

    segments = 0  # of TP-invariance, that this rank has
    sums_any_order = True  # of tokens: gradients may be summed as rows arrive
    kept: KeptRows = "none"  # the rows that forward keeps of an x that it gathered; none: x itself is kept

    def __str__(self) -> str:
        return ""

    def named(self, op: str) -> str:
        return op

    # operands

    def activations(self, x: Tensor) -> Operand:
        return x

    def gradients(self, dy: Tensor) -> Operand:
        """Return the operand of dy."""
        return dy

    def weight(self, weight: Tensor, transposed: bool) -> Operand:
        return weight

    def sent(self, operand: Operand) -> Tensor:
        """Return the tensor of an operand whose rows are sent."""
        rows: Tensor = operand
        return rows

    def sent_as(self, x: Tensor) -> tuple[int, torch.dtype]:
        """Return width and dtype of the tensor that is sent of such a matrix."""
        return x.shape[1], x.dtype

    def received(self, like: Operand, rows: Tensor) -> Operand:
        """Return the operand of rows that were received. like: another operand of its kind"""
        return rows

    def kept_operand(self, rows: Tensor, features: int) -> Operand:
        """Return the operand of rows that forward sent and kept."""
        return rows

    def numbers(self, operand: Operand) -> Tensor:
        """Return the numbers of an operand as a matrix; those in fp8 are dequantized."""
        numbers: Tensor = operand
        return numbers

    def features(self, operand: Operand) -> int:
        """Return how many columns an operand's matrix has."""
        return int(operand.shape[1])

    def described(self, operand: Operand) -> str:
        """Describe what of an operand, besides its shape, must be the same on all ranks."""
        return ""

    def dtype(self, rows: Tensor) -> torch.dtype:
        """Return the dtype of products of rows that were received."""
        return rows.dtype

    def blocks(self, arriving: Iterable[tuple[slice, Tensor]], rows: int) -> Iterable[tuple[slice, Tensor]]:
        """Regroup rows that arrive in chunks into the blocks that are multiplied at once."""
        return arriving

    # products

    def product_into(
        self,
        out: Sequence[Tensor],
        x: Operand,
        weight: Operand,
        bias: Tensor | None,
        transposed: bool,
        activation: Activation,
        keep_z: bool,
    ) -> None:
        """Write act(x wᵀ + bias) into out[0], and if keep_z, its argument into out[1] where it differs."""
        if transposed:
            primitives.into(primitives.linear, out, x, weight, bias, activation, keep_z)
        else:
            primitives.into(primitives.dgrad, out, x, weight)

    def compute(
        self, primitive: Callable[..., Any], out: Sequence[Along], x: Tensor, *args: Along | object
    ) -> None:
        """Call `primitives.into(primitive, out, x, *args)`, with the tensors of `Along`."""
        whole = [arg.tensor if isinstance(arg, Along) else arg for arg in args]
        primitives.into(primitive, [each.tensor for each in out if each.tensor is not None], x, *whole)

    def waiting_product(
        self,
        x: Operand,
        weight: Operand,
        bias: Tensor | None,
        transposed: bool,
        activation: Activation,
        keep_z: bool,
    ) -> WaitingProduct:
        """Return the kernel that computes act(x wᵀ + bias) while rows of x arrive, to be told how to wait."""
        from tpkernels.kernels import dgrad, linear  # here: a CPU needs no Triton

        if transposed:
            return partial(linear.linear_fwd, x, weight, bias, activation=activation, keep_z=keep_z)
        return lambda **wait: (dgrad.dgrad(x, weight, **wait), None)

    def terms(self, pairs: Sequence[tuple[Operand, Tensor]], transposed: bool) -> Terms:
        """Return this rank's terms of a sum over ranks: the sum of the products of these pairs."""
        return ProductSum(pairs, transposed)

    def weight_gradient(
        self, dy: Tensor, x: Tensor, into: Into, *, split: Literal["dy", "x"]
    ) -> Tensor | None:
        """Compute dyᵀ x; None if it was added to a main_grad.

        split: the factor that ranks have shards of
        """
        return weight_gradient(dy, x, into)

    def bias_gradient(self, dz: Tensor, *, split: bool) -> Tensor:
        """Sum dz over tokens, in its dtype, which is that of the bias. split: ranks have shards of dz"""
        return as_dtype(primitives.bias_grad(dz), dz.dtype)

    # between two products; `unit` is an activation, or a gated unit of two weights: of up and gate

    def unit(
        self, rows: Gathered, ups: Sequence[Tensor], b_up: Tensor | None, unit: Activation | Glu, keep: bool
    ) -> tuple[Operand, list[Tensor]]:
        """Compute h = act(x w_upᵀ + b_up), or f(g) * u; and if keep, z, or u and g."""
        if len(ups) == 1:
            apart = keep and unit != "none"  # else z is h
            h, *zs = rows.products(ups, [b_up], unit, apart)  # type: ignore[arg-type]
            return h, zs if apart or not keep else [h]
        up, gate = (Along(weight, 0) for weight in ups)

        def compute(_: slice, chunk: Tensor, h_u_g: list[Tensor]) -> None:
            out = columns([h_u_g[0], *reversed(h_u_g[1:])])
            self.compute(primitives.glu, out, chunk, gate, up, unit, keep)

        h, *zs = rows.each([ups[0].shape[0]] * (3 if keep else 1), compute)
        return h, zs

    def unit_gradients(
        self,
        rows: Gathered,
        w_down: Tensor,
        zs: Sequence[Tensor],
        unit: Activation | Glu,
        needs: tuple[bool, bool, bool],
    ) -> tuple[Tensor | None, Sequence[Tensor], Tensor | None]:
        """Recompute h, and compute dz of each z and the sum over tokens of the first.

        rows: of dy; needs: which of these three
        """
        down, width = Along(w_down, 1), w_down.shape[1]
        dbs: list[Tensor] = []
        sums = needs[2] and self.sums_any_order

        def compute(chunk_rows: slice, dy: Tensor, h_and_dzs: list[Tensor]) -> None:
            h, *dzs = h_and_dzs
            saved = [rows_of(z, chunk_rows) for z in zs]
            if len(zs) == 2:
                u, g = columns(saved)
                self.compute(primitives.dglu, columns([*reversed(dzs), h]), dy, down, g, u, unit)
                return
            if sums:
                dbs.append(h.new_empty(width, dtype=sums_dtype(h.dtype)))
            dz_and_db = (*columns(dzs), *(Along(db, 0) for db in dbs[-1:]))
            self.compute(primitives.dgrad_act, dz_and_db, dy, down, *columns(saved), unit, sums)
            self.act_into(h, saved[0], unit)  # type: ignore[arg-type]

        h, *dzs = rows.each([width] * (1 + len(zs)), compute)
        if not needs[2]:
            return h, dzs, None
        db = as_dtype(sum(dbs[1:], dbs[0]), h.dtype) if dbs else self.bias_gradient(dzs[0], split=True)
        return h, dzs, db

    def act_into(self, h: Tensor, z: Tensor, activation: Activation) -> None:
        """Write act(z) into h."""
        act_into(h, z, activation)

    def act_gradient(self, dy: Tensor, z: Tensor, activation: Activation) -> Tensor:
        """Compute dz = dy * act'(z)."""
        return act_grad_ref(dy, z, activation)


def columns(tensors: Sequence[Tensor]) -> list[Along]:
    """Say of tensors that ranks have shards of their columns."""
    return [Along(tensor, 1) for tensor in tensors]


PLAIN = Plain()
