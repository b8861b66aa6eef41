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
from dataclasses import dataclass
from functools import partial
from typing import Literal, cast

import torch
from torch import Tensor

from tpkernels.dispatch import primitives
from tpkernels.dispatch.scaled import DTYPE, Wide
from tpkernels.kernels.activations import GATE_OF, Activation, Glu, act_grad_ref, act_ref
from tpkernels.kernels.recipe import Format, Recipe
from tpkernels.kernels.scaled import Scaled, words_of
from tpkernels.ops.main_grad import Into, dtype_of_gradient, weight_gradient
from tpkernels.ops.numerics import Gathered, KeptRows, Plain, WaitingProduct
from tpkernels.ops.quantized.weights import columns_of_weight, rows_of_weight

Pair = tuple[Scaled, Scaled]


class Quantized(Plain):
    """Quantizes operands by a recipe, and computes products of them in fp8; results are in one dtype."""

    sums_any_order = False
    kept: KeptRows = "own"

    def __init__(self, recipe: Recipe, dtype: torch.dtype) -> None:
        self.recipe, self._dtype = recipe, dtype

    def __str__(self) -> str:
        return word_of(self._dtype) + " " + str(self.recipe)  # the compiler traces no f-string of a recipe

    def named(self, op: str) -> str:
        return f"{op} in fp8"

    def activations(self, x: Tensor) -> Scaled:
        return self._quantized(x, "e4m3")

    def gradients(self, dy: Tensor) -> Scaled:
        return self._quantized(dy, self.recipe.gradients)

    def _quantized(self, x: Tensor, format: Format) -> Scaled:
        scaling = self.recipe.scaling
        words = primitives.quantize(x, None, "none", format, scaling, self.recipe.power_of_two, False)
        return Scaled(words, x.shape[1], format, scaling)

    def weight(self, weight: Tensor, transposed: bool) -> Scaled:
        return (rows_of_weight if transposed else columns_of_weight)(weight, self.recipe)

    def sent(self, operand: Scaled) -> Tensor:
        return operand.words

    def sent_as(self, x: Tensor) -> tuple[int, torch.dtype]:
        return words_of(x.shape[1], self.recipe.scaling), torch.int32

    def received(self, like: Scaled, rows: Tensor) -> Scaled:
        return like.with_words(rows)

    def kept_operand(self, rows: Tensor, features: int) -> Scaled:
        return Scaled(rows, features, "e4m3", self.recipe.scaling)

    def numbers(self, operand: Scaled) -> Tensor:
        return primitives.dequantize(operand.data, operand.scale, word_of(self._dtype))

    def features(self, operand: Scaled) -> int:
        return operand.features

    def described(self, operand: Scaled) -> str:
        # words by another recipe may have this shape, too: ranks must not take them for these
        return f" in {operand.format}, {self.recipe}"

    def dtype(self, rows: Tensor) -> torch.dtype:
        return self._dtype

    def product_into(
        self,
        out: Sequence[Tensor],
        x: Scaled,
        weight: Scaled,
        bias: Tensor | None,
        transposed: bool,
        activation: Activation,
        keep_z: bool,
    ) -> None:
        operands = x.data, weight.data, x.scale, weight.scale_of_squares, bias, activation, keep_z
        fast = self.recipe.is_fast(forward=transposed)
        primitives.into(primitives.scaled_linear, out, *operands, word_of(out[0].dtype), fast)

    def waiting_product(
        self,
        x: Scaled,
        weight: Scaled,
        bias: Tensor | None,
        transposed: bool,
        activation: Activation,
        keep_z: bool,
    ) -> WaitingProduct:
        from tpkernels.kernels.scaled_linear import scaled_linear_fwd

        return partial(
            scaled_linear_fwd,
            *(x.data, weight.data, x.scale, weight.scale_of_squares, bias),
            activation=activation,
            keep_z=keep_z,
            dtype=word_of(self._dtype),
            fast_accumulate=self.recipe.is_fast(forward=transposed),
        )

    def terms(self, pairs: Sequence[tuple[Scaled, Tensor]], transposed: bool) -> ScaledSum:
        fast = self.recipe.is_fast(forward=transposed)
        return ScaledSum([(a, self.weight(w, transposed)) for a, w in pairs], self._dtype, fast)

    def weight_gradient(
        self,
        dy: Tensor,
        x: Tensor,
        into: Into,
        *,
        split: Literal["dy", "x"],
    ) -> Tensor | None:
        if self.recipe.wgrad == "bf16":
            return weight_gradient(dy, x, into)
        pairs = [(self.gradients(dy.t()), self.activations(x.t()))]
        fast = self.recipe.is_fast(forward=False)
        gradient = _sum_of(pairs, dtype_of_gradient(x, into), fast)
        if not isinstance(into, Tensor):
            return gradient
        into += gradient
        return None

    def unit(
        self, rows: Gathered, ups: Sequence[Tensor], b_up: Tensor | None, unit: Activation | Glu, keep: bool
    ) -> tuple[Scaled, list[Tensor]]:
        """As in `Plain`; h is quantized from fp32, and never written in 16 bits."""
        zs = rows.products(ups, [b_up, *[None] * (len(ups) - 1)])
        scaling, power_of_two = self.recipe.scaling, self.recipe.power_of_two
        if unit in GATE_OF:
            u, g = zs
            f = GATE_OF[cast("Glu", unit)]
            words = primitives.quantize(g, u, f, "e4m3", scaling, power_of_two, False)
        else:
            f = cast("Activation", unit)
            words = primitives.quantize(zs[0], None, f, "e4m3", scaling, power_of_two, False)
        return Scaled(words, zs[0].shape[1], "e4m3", scaling), zs if keep else []

    def unit_gradients(
        self,
        rows: Gathered,
        w_down: Tensor,
        zs: Sequence[Tensor],
        unit: Activation | Glu,
        needs: tuple[bool, bool, bool],
    ) -> tuple[Tensor | None, Sequence[Tensor], Tensor | None]:
        needs_h, needs_dz, needs_db = needs
        h = between(zs, unit) if needs_h else None
        dzs = between_gradients(rows.product(w_down), zs, unit) if needs_dz else []
        return h, dzs, self.bias_gradient(dzs[0], split=True) if needs_db else None


def between(zs: Sequence[Tensor], unit: Activation | Glu) -> Tensor:
    """Compute h of z, or of u and g."""
    if unit in GATE_OF:
        u, g = zs
        return act_ref(g, GATE_OF[cast("Glu", unit)]) * u
    return act_ref(zs[0], cast("Activation", unit))


def between_gradients(dh: Tensor, zs: Sequence[Tensor], unit: Activation | Glu) -> list[Tensor]:
    """Compute dz of z, or du and dg."""
    if unit in GATE_OF:
        (u, g), activation = zs, GATE_OF[cast("Glu", unit)]
        return [dh * act_ref(g, activation), act_grad_ref(dh * u, g, activation)]
    return [act_grad_ref(dh, zs[0], cast("Activation", unit))]


@dataclass(frozen=True, slots=True)
class ScaledSum:
    """This rank's terms of a sum over ranks, computed for the rows that are asked for."""

    pairs: Sequence[Pair]
    dtype: torch.dtype
    fast: bool

    @property
    def rows(self) -> int:
        return self.pairs[0][0].words.shape[0]

    @property
    def cols(self) -> int:
        return self.pairs[0][1].words.shape[0]

    @property
    def like(self) -> Tensor:
        return self.pairs[0][0].words.new_empty(0, dtype=self.dtype)

    def __call__(self, rows: slice) -> Tensor:
        return _sum_of([(a.rows(rows), w) for a, w in self.pairs], self.dtype, self.fast)

    def alone(self, bias: Tensor | None) -> Tensor:
        return _sum_of(self.pairs, self.dtype, self.fast, bias)


def _sum_of(pairs: Sequence[Pair], dtype: torch.dtype, fast: bool, bias: Tensor | None = None) -> Tensor:
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


def quantized_named(name: str) -> Quantized:
    """The strategy that `str` writes so."""
    dtype, _, recipe = name.partition(" ")
    return Quantized(Recipe.named(recipe), DTYPE[cast("Wide", dtype)])
