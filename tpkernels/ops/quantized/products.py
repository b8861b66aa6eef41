"""Products in fp8: operands quantized, rows gathered as words, partial sums added over ranks.

Each product is of rows in fp8 with their scales, and gives sums in fp32, rounded once; ^ marks rows in fp8:

    forward   y  = x̂ ŵᵀ + b       rows of x, rows of w
    dgrad     dx = d̂y w̃           rows of dy, columns of w, which have scales of their own
    wgrad     dw = dyᵀ x          in the dtype of x; or in fp8, columns of dy and of x

What sequence parallelism gathers travels as words, forward and backward. wgrad takes what this rank has: of
x and dy the numbers themselves, of what was gathered the rounded ones. Where ranks share the depth of a
product, its scales are of this rank's features: other numbers of ranks round otherwise.

The recipe says which of the three may accumulate fast; what backward computes again, it computes as forward
did.

Sums over ranks are not sent in fp8: R terms, each rounded to 4 bits, are off as much as each of them is, and
that would be the gradient itself, not an operand that many products average out.

Saved for backward: of an x that is gathered its words, and not what no gradient needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor

from tpkernels.comm.transports.rows import Gather, Terms
from tpkernels.dispatch import primitives
from tpkernels.dispatch.scaled import Wide
from tpkernels.kernels.activations import GATE_OF, Activation, Glu, act_grad_ref, act_ref
from tpkernels.kernels.recipe import Format, Recipe
from tpkernels.kernels.scaled import Scaled
from tpkernels.ops.main_grad import Into, dtype_of_gradient, weight_gradient
from tpkernels.ops.matmul import Direction, Pair, Plain, Waiting, into
from tpkernels.ops.quantized.weights import quantized_weight

ScaledPair = tuple[Scaled, Scaled]


class Quantized(Plain):
    """Quantizes operands by a recipe, and computes products of them in fp8; what is packed are words."""

    is_plain = False

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        # words by another recipe may have this shape, too: ranks must not take them for these
        self.how_x, self.how_dy = f" in e4m3, {recipe}", f" in {recipe.gradients}, {recipe}"

    @property
    def recipe(self) -> str:  # type: ignore[override]
        return str(self._recipe)

    def pack(self, x: Tensor, of: Direction = "x") -> Tensor:
        recipe = self._recipe
        return primitives.quantize(
            x, None, "none", self._format(of), recipe.scaling, recipe.power_of_two, False
        )

    def unpack(self, rows: Tensor, features: int, dtype: torch.dtype, of: Direction = "x") -> Tensor:
        scaled = self._scaled(rows, features, of)
        return primitives.dequantize(scaled.data, scaled.scale, word_of(dtype))

    def _format(self, of: Direction) -> Format:
        return "e4m3" if of == "x" else self._recipe.gradients

    def _scaled(self, rows: Tensor, features: int, of: Direction) -> Scaled:
        return Scaled(rows, features, self._format(of), self._recipe.scaling)

    def _weight(self, weight: Tensor, transposed: bool) -> Scaled:
        return quantized_weight(weight, self._recipe, columns=not transposed)

    def _product_into(
        self,
        out: Sequence[Tensor],
        x: Tensor,
        weight: Scaled,
        bias: Tensor | None,
        transposed: bool,
        activation: Activation,
        keep_z: bool,
        wait: Waiting,
    ) -> None:
        rows = self._scaled(x, weight.features, "x" if transposed else "dy")
        operands = rows.data, weight.data, rows.scale, weight.scale_of_squares, bias, activation, keep_z
        fast = self._recipe.is_fast(forward=transposed)
        into(primitives.scaled_linear, out, *operands, word_of(out[0].dtype), fast, wait=wait)

    def terms(self, pairs: Sequence[Pair], transposed: bool, dtype: torch.dtype) -> Terms:
        fast = self._recipe.is_fast(forward=transposed)
        of: Direction = "x" if transposed else "dy"
        weights = [self._weight(w, transposed) for _, w in pairs]
        scaled = [(self._scaled(a, w.features, of), w) for (a, _), w in zip(pairs, weights, strict=True)]
        (first, _), cols = pairs[0], weights[0].words.shape[0]
        like = first.new_empty(0, dtype=dtype)
        compute = partial(_sum_of_rows, scaled, dtype, fast)
        alone = partial(_sum_of, scaled, dtype, fast)
        return Terms(first.shape[0], cols, like, compute, width=cols, alone=alone)

    def wgrad(self, dy: Tensor, x: Tensor, into: Into, *, split: Direction) -> Tensor | None:
        if self._recipe.wgrad == "bf16":
            return weight_gradient(dy, x, into)
        columns = self.pack(dy.t(), "dy"), self.pack(x.t())
        tokens = dy.shape[0]
        pairs = [(self._scaled(columns[0], tokens, "dy"), self._scaled(columns[1], tokens, "x"))]
        gradient = _sum_of(pairs, dtype_of_gradient(x, into), self._recipe.is_fast(forward=False))
        if not isinstance(into, Tensor):
            return gradient
        into += gradient
        return None

    def unit(
        self,
        rows: Gather,
        ups: Sequence[Tensor],
        b_up: Tensor | None,
        unit: Activation | Glu,
        keep: bool,
        dtype: torch.dtype,
    ) -> tuple[Tensor, list[Tensor]]:
        """As in `Plain`; h is quantized from fp32, and never written in 16 bits."""
        zs = self.product(rows, ups, [b_up, *[None] * (len(ups) - 1)], dtype=dtype)
        scaling, power_of_two = self._recipe.scaling, self._recipe.power_of_two
        u, z, f = _gated(zs, unit)
        words = primitives.quantize(z, u, f, "e4m3", scaling, power_of_two, False)
        return words, zs if keep else []

    def unit_gradients(
        self,
        rows: Gather,
        w_down: Tensor,
        zs: Sequence[Tensor],
        unit: Activation | Glu,
        needs: tuple[bool, bool, bool],
        dtype: torch.dtype,
    ) -> tuple[Tensor | None, Sequence[Tensor], Tensor | None]:
        needs_h, needs_dz, needs_db = needs
        h = between(zs, unit) if needs_h else None
        dzs: Sequence[Tensor] = []
        if needs_dz:
            (dh,) = self.product(rows, [w_down], [None], dtype=dtype, transposed=False)
            dzs = between_gradients(dh, zs, unit)
        return h, dzs, self.bias_grad(dzs[0], split=True) if needs_db else None


def _gated(zs: Sequence[Tensor], unit: Activation | Glu) -> tuple[Tensor | None, Tensor, Activation]:
    """Return u, or None without a gate; the argument of the activation, and the activation."""
    if unit in GATE_OF:
        return zs[0], zs[1], GATE_OF[cast("Glu", unit)]
    return None, zs[0], cast("Activation", unit)


def between(zs: Sequence[Tensor], unit: Activation | Glu) -> Tensor:
    """Compute h of z, or of u and g."""
    u, z, f = _gated(zs, unit)
    return act_ref(z, f) if u is None else act_ref(z, f) * u


def between_gradients(dh: Tensor, zs: Sequence[Tensor], unit: Activation | Glu) -> list[Tensor]:
    """Compute dz of z, or du and dg."""
    u, z, f = _gated(zs, unit)
    return [act_grad_ref(dh, z, f)] if u is None else [dh * act_ref(z, f), act_grad_ref(dh * u, z, f)]


def _sum_of_rows(pairs: Sequence[ScaledPair], dtype: torch.dtype, fast: bool, rows: slice) -> Tensor:
    return _sum_of([(a.rows(rows), w) for a, w in pairs], dtype, fast)


def _sum_of(
    pairs: Sequence[ScaledPair], dtype: torch.dtype, fast: bool, bias: Tensor | None = None
) -> Tensor:
    """Add up products in fp32, and round the sum once."""
    (first, weight), *others = pairs
    if not others:
        return _product(first, weight, bias, dtype, fast)
    assert bias is None, "only gradients add up products"
    total = _product(first, weight, None, torch.float32, fast)
    for other, weight in others:
        total += _product(other, weight, None, torch.float32, fast)
    return total.to(dtype)


def _product(x: Scaled, weight: Scaled, bias: Tensor | None, dtype: torch.dtype, fast: bool) -> Tensor:
    """Compute x̂ ŵᵀ + bias."""
    operands = x.data, weight.data, x.scale, weight.scale_of_squares, bias
    return primitives.scaled_linear(*operands, "none", False, word_of(dtype), fast)[0]


def word_of(dtype: torch.dtype) -> Wide:
    """The name of a dtype, as operators take it."""
    return cast("Wide", str(dtype).removeprefix("torch."))
