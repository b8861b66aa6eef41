"""How an op computes: each op is written once, and one of three strategies computes its steps.

    Plain       products in the dtype of the operands; an activation is computed with the product before it
    Segmented   the same in calls of fixed sizes, for TP-invariance: see `tensor_parallel.segments`
    Quantized   products of operands in fp8: see `quantized.products`

A strategy is given matrices (tokens, features), and gives matrices. What travels between ranks are rows of
`pack(x)`: x itself, or its words in fp8.

    pack, unpack           a matrix as rows that are sent and multiplied, and back
    product                act(x wᵀ + b), or dy w, of rows as they arrive
    unit, unit_gradients   what lies between the two products of an MLP
    terms                  this rank's terms of a sum of products over ranks
    wgrad, bias_grad, act_grad
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from tpkernels.comm.transports.rows import Gather, Terms
from tpkernels.dispatch import primitives
from tpkernels.dispatch.products import sums_dtype
from tpkernels.kernels.activations import Activation, Glu, act_grad_ref, act_into
from tpkernels.ops.inputs import as_dtype
from tpkernels.ops.main_grad import Into, weight_gradient
from tpkernels.ops.tensor_parallel.flag_waits import has_waited, how_to_wait

if TYPE_CHECKING:
    from tpkernels.kernels.tiles import Kernel

Pair = tuple[Tensor, Tensor]  # activations (tokens, depth), and a weight (cols, depth) or (depth, cols)
Waiting = Mapping[str, Any]  # how a kernel is told to wait for its rows; empty: they are there
Compute = Callable[[slice, Tensor, list[Tensor], Waiting], object]  # a range of rows, these rows, and outputs
NO_WAIT: Waiting = {}
Direction = Literal["x", "dy"]  # what rows are of: activations, or their gradients


def rows_of(tensor: Tensor, rows: slice) -> Tensor:
    """Return tensor[rows], without indexing if that is all of it."""
    return tensor if rows.stop - rows.start == tensor.shape[0] else tensor[rows]


class Along:
    """A tensor, and the dimension along which ranks have shards of it."""

    __slots__ = ("dim", "tensor")

    def __init__(self, tensor: Tensor | None, dim: int) -> None:
        self.tensor, self.dim = tensor, dim


def columns(tensors: Sequence[Tensor]) -> list[Along]:
    """Say of tensors that ranks have shards of their columns."""
    return [Along(tensor, 1) for tensor in tensors]


class Plain:
    """Computes in the dtype of the operands."""

    segments = 0  # of TP-invariance, that this rank has
    recipe = ""  # of fp8, by name
    how_x = how_dy = ""  # what of packed rows, besides their shape, must be the same on all ranks
    is_plain = True  # what is sent of a matrix is the matrix, and gradients may be summed as rows arrive

    def pack(self, x: Tensor, of: Direction = "x") -> Tensor:
        """Return a matrix as rows that are sent and multiplied."""
        return x

    def unpack(self, rows: Tensor, features: int, dtype: torch.dtype, of: Direction = "x") -> Tensor:
        """Return the matrix of packed rows."""
        return rows

    def product(
        self,
        rows: Gather,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        activation: Activation = "none",
        keep_z: bool = False,
        *,
        dtype: torch.dtype,
        transposed: bool = True,
        also: Compute | None = None,
    ) -> list[Tensor]:
        """Compute y = act(x wᵀ + b) of each weight, or x w unless transposed; if keep_z, z of each as well.

        rows: packed; they are multiplied as they arrive
        dtype: of the results
        also: is called with each chunk of rows
        """
        if rows.is_whole and self.is_plain and also is None and rows.delivery is None:
            x = rows.all()  # tiny products take half the time so
            if not transposed:
                return [primitives.dgrad(x, weight) for weight in weights]
            ys, zs = [], []
            for weight, bias in zip(weights, biases, strict=True):
                y, z = primitives.linear(x, weight, bias, activation, keep_z)
                ys.append(y)
                zs.append(z)
            return ys if not keep_z else [*ys, *zs]  # type: ignore[list-item]
        prepared = [self._weight(weight, transposed) for weight in weights]

        def multiply(here: slice, chunk: Tensor, out: list[Tensor], wait: Waiting) -> None:
            if also is not None:
                also(here, chunk, [], wait)
            for i, (weight, bias) in enumerate(zip(prepared, biases, strict=True)):
                self._product_into(
                    out[i :: len(prepared)], chunk, weight, bias, transposed, activation, keep_z, wait
                )

        widths = [weight.shape[0 if transposed else 1] for weight in weights] * (2 if keep_z else 1)
        return self.each(rows, widths, multiply, dtype, "linear" if transposed else "dgrad", weights)

    def each(
        self,
        rows: Gather,
        widths: Sequence[int],
        compute: Compute,
        dtype: torch.dtype,
        kernel: Kernel = "linear",
        weights: Sequence[Tensor] = (),
    ) -> list[Tensor]:
        """Return (tokens, width) of each width; `compute` writes the rows of each chunk as it arrives.

        kernel: where it can wait for rows, it is given all at once, and how to wait for them
        weights: by which it multiplies
        """
        full = rows.full
        tokens = full.shape[0]
        results = [torch.empty((tokens, width), dtype=dtype, device=full.device) for width in widths]
        if (delivery := rows.delivery) is not None:  # kernels wait, for all rows
            compute(slice(0, tokens), full, results, how_to_wait(delivery, kernel, full, weights))
            has_waited(delivery, any(width > 0 for width in widths))
            rows.read()
            return results
        for here, chunk in self._blocks(rows, tokens):
            compute(here, chunk, [rows_of(matrix, here) for matrix in results], NO_WAIT)
        return results

    def terms(self, pairs: Sequence[Pair], transposed: bool, dtype: torch.dtype) -> Terms:
        """Return this rank's terms of a sum over ranks: Σ a wᵀ, or Σ a w unless transposed.

        pairs: a packed
        """
        first, weight = pairs[0]
        rows, cols = first.shape[0], weight.shape[0 if transposed else 1]
        compute = partial(_terms_of, pairs, transposed)
        alone = partial(compute, slice(0, rows))  # the product adds the bias
        linear = pairs if transposed else [(a, w.t()) for a, w in pairs]
        return Terms(rows, cols, first, compute, width=cols, pairs=linear, alone=alone)

    def wgrad(self, dy: Tensor, x: Tensor, into: Into, *, split: Direction) -> Tensor | None:
        """Compute dyᵀ x; None if it was added to a main_grad. split: the factor that ranks have shards of"""
        return weight_gradient(dy, x, into)

    def bias_grad(self, dz: Tensor, *, split: bool) -> Tensor:
        """Sum dz over tokens, in its dtype, which is that of the bias. split: ranks have shards of dz"""
        return as_dtype(primitives.bias_grad(dz), dz.dtype)

    def act_grad(self, dy: Tensor, z: Tensor, activation: Activation) -> Tensor:
        """Compute dz = dy * act'(z)."""
        return act_grad_ref(dy, z, activation)

    def unit(
        self,
        rows: Gather,
        ups: Sequence[Tensor],
        b_up: Tensor | None,
        unit: Activation | Glu,
        keep: bool,
        dtype: torch.dtype,
    ) -> tuple[Tensor, list[Tensor]]:
        """Compute h = act(x w_upᵀ + b_up), packed; or f(g) * u. If keep, return z, or u and g as well.

        unit: an activation, or a gated unit of two weights: of up and gate
        """
        if len(ups) == 1:
            apart = keep and unit != "none"  # else z is h
            h, *zs = self.product(rows, ups, [b_up], unit, apart, dtype=dtype)  # type: ignore[arg-type]
            return h, zs if apart or not keep else [h]
        up, gate = (Along(weight, 0) for weight in ups)

        def compute(_: slice, chunk: Tensor, h_u_g: list[Tensor], wait: Waiting) -> None:
            out = columns([h_u_g[0], *reversed(h_u_g[1:])])
            self._compute(primitives.glu, out, chunk, gate, up, unit, keep, wait=wait)

        h, *zs = self.each(rows, [ups[0].shape[0]] * (3 if keep else 1), compute, dtype, "glu", ups)
        return h, zs

    def unit_gradients(
        self,
        rows: Gather,
        w_down: Tensor,
        zs: Sequence[Tensor],
        unit: Activation | Glu,
        needs: tuple[bool, bool, bool],
        dtype: torch.dtype,
    ) -> tuple[Tensor | None, Sequence[Tensor], Tensor | None]:
        """Recompute h, and compute dz of each z and the sum over tokens of the first.

        rows: of dy; needs: which of these three
        """
        down, width = Along(w_down, 1), w_down.shape[1]
        dbs: list[Tensor] = []
        sums = needs[2] and self.is_plain

        def compute(here: slice, dy: Tensor, h_and_dzs: list[Tensor], wait: Waiting) -> None:
            h, *dzs = h_and_dzs
            saved = [rows_of(z, here) for z in zs]
            if len(zs) == 2:
                u, g = columns(saved)
                self._compute(primitives.dglu, columns([*reversed(dzs), h]), dy, down, g, u, unit, wait=wait)
                return
            if sums:
                dbs.append(h.new_empty(width, dtype=sums_dtype(h.dtype)))
            dz_and_db = (*columns(dzs), *(Along(db, 0) for db in dbs[-1:]))
            self._compute(primitives.dgrad_act, dz_and_db, dy, down, *columns(saved), unit, sums, wait=wait)
            self._act_into(h, saved[0], unit)  # type: ignore[arg-type]

        kernel: Kernel = "dglu" if len(zs) == 2 else "dgrad"
        h, *dzs = self.each(rows, [width] * (1 + len(zs)), compute, dtype, kernel, [w_down])
        if not needs[2]:
            return h, dzs, None
        db = as_dtype(sum(dbs[1:], dbs[0]), h.dtype) if dbs else self.bias_grad(dzs[0], split=True)
        return h, dzs, db

    # what strategies compute otherwise

    def _weight(self, weight: Tensor, transposed: bool) -> Any:
        """Return a weight as `_product_into` takes it."""
        return weight

    def _blocks(self, rows: Gather, tokens: int) -> Iterable[tuple[slice, Tensor]]:
        """Yield the blocks of rows that are multiplied at once: chunks as they arrive."""
        return rows

    def _product_into(
        self,
        out: Sequence[Tensor],
        x: Tensor,
        weight: Any,
        bias: Tensor | None,
        transposed: bool,
        activation: Activation,
        keep_z: bool,
        wait: Waiting,
    ) -> None:
        """Write act(x wᵀ + bias) into out[0], and if keep_z, its argument into out[1] where it differs."""
        split = Along(weight, 0 if transposed else 1)
        if transposed:
            operands = split, Along(bias, 0), activation, keep_z
            self._compute(primitives.linear, columns(out), x, *operands, wait=wait)
        else:
            self._compute(primitives.dgrad, columns(out), x, split, wait=wait)

    def _compute(
        self,
        primitive: Callable[..., Any],
        out: Sequence[Along],
        x: Tensor,
        *args: Along | object,
        wait: Waiting,
    ) -> None:
        """Compute a primitive of x and args into out, with the tensors of `Along`."""
        whole = [arg.tensor if isinstance(arg, Along) else arg for arg in args]
        into(primitive, [each.tensor for each in out if each.tensor is not None], x, *whole, wait=wait)

    def _act_into(self, h: Tensor, z: Tensor, activation: Activation) -> None:
        """Write act(z) into h."""
        act_into(h, z, activation)


def into(primitive: Callable[..., Any], out: Sequence[Tensor], *args: Any, wait: Waiting) -> None:
    """Compute a primitive into given tensors, by a kernel that waits for rows if it is told how."""
    if wait:
        record = primitives.RECORDS[primitive.__name__]
        with primitives.told(record.name, args, "Triton, which waits for rows"):
            record.by_kernel(*args, out=list(out), **wait)
    else:
        primitives.into(primitive, out, *args)


def _terms_of(pairs: Sequence[Pair], transposed: bool, rows: slice, bias: Tensor | None = None) -> Tensor:
    """Compute some rows of a wᵀ + bias; or of Σ a w unless transposed."""
    if not transposed:
        return gradient_sum([(rows_of(a, rows), w) for a, w in pairs])
    ((a, weight),) = pairs  # only gradients add up products
    some = a if rows.stop - rows.start == a.shape[0] else a[rows]  # without a frame
    return primitives.linear(some, weight, bias, "none", False)[0]


def gradient_sum(pairs: Sequence[Pair]) -> Tensor:
    """Compute Σ a w over the pairs, two at a time in one accumulator."""
    (a, w), *others = pairs
    if not others:
        return primitives.dgrad(a, w)
    total = primitives.dgrad_pairs(a, w, *others[0])
    return total.add_(gradient_sum(others[1:])) if others[1:] else total


PLAIN = Plain()
