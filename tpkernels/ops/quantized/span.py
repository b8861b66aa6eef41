"""What ops in fp8 share: operands quantized, rows gathered as words, partial sums added over ranks.

Each product is of rows in fp8 with their scales, and gives sums in fp32, rounded once:

    forward   y  = x̂ ŵᵀ + b       rows of x, rows of w
    dgrad     dx = d̂y w̃           rows of dy, columns of w, which have scales of their own
    wgrad     dw = dyᵀ x          in the dtype of x; or in fp8, columns of dy and of x

What sequence parallelism gathers travels as words, forward and backward. wgrad takes what this rank has: of x
and dy the numbers themselves, of what was gathered the rounded ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tpkernels.comm.transports.rows import Pending
from tpkernels.dispatch import primitives
from tpkernels.dispatch.operators import Packed
from tpkernels.dispatch.scaled import Wide
from tpkernels.kernels.activations import Activation, Glu
from tpkernels.kernels.recipe import Format, Recipe
from tpkernels.kernels.scaled import Scaled
from tpkernels.ops.main_grad import Into, dtype_of_gradient, weight_gradient
from tpkernels.ops.quantized.limits import require_recipe
from tpkernels.ops.quantized.weights import columns_of_weight, rows_of_weight
from tpkernels.ops.tensor_parallel.parallel import (
    Done,
    Rows,
    arrivals,
    group_named,
    name_of,
    start_rows,
    start_sum,
)
from tpkernels.ops.tensor_parallel.product_sum import rows_of

MaybeGroup = Annotated[
    ProcessGroup | None,
    Packed(
        str,
        lambda group: "" if group is None else name_of(group),
        lambda name: group_named(name) if name else None,
    ),
]
NamedRecipe = Annotated[Recipe, Packed(str, str, Recipe.named)]


class Span(NamedTuple):
    """Over which ranks an op is split, and by which recipe it computes."""

    group: MaybeGroup  # None: this rank alone
    sequence_parallel: bool
    overlap: bool
    recipe: NamedRecipe

    @property
    def token_shards(self) -> int:
        """How many ranks share the tokens, where these are split."""
        return self.group.size() if self.group is not None and self.sequence_parallel else 1

    def activations(self, x: Tensor) -> Scaled:
        return self._quantized(x, "e4m3")

    def between(self, zs: Sequence[Tensor], activation: Activation, glu: Glu | None) -> Scaled:
        """The activation of z, or the gated unit of u and g, which are not written in 16 bits."""
        scaling, power_of_two = self.recipe.scaling, self.recipe.power_of_two
        if glu is None:
            words = primitives.quantize_act(zs[0], activation, "e4m3", scaling, power_of_two)
        else:
            u, g = zs
            words = primitives.quantize_glu(g, u, glu, "e4m3", scaling, power_of_two)
        return Scaled(words, zs[0].shape[1], "e4m3", scaling)

    def gradients(self, dy: Tensor) -> Scaled:
        return self._quantized(dy, self.recipe.gradients)

    def _quantized(self, x: Tensor, format: Format) -> Scaled:
        scaling = self.recipe.scaling
        words = primitives.quantize(x, format, scaling, self.recipe.power_of_two, False)
        return Scaled(words, x.shape[1], format, scaling)

    def rows(self, weight: Tensor) -> Scaled:
        """Of a weight, for forward."""
        return rows_of_weight(weight, self.recipe)

    def columns(self, weight: Tensor) -> Scaled:
        """Of a weight, for dgrad."""
        return columns_of_weight(weight, self.recipe)

    def gather(self, op: str, name: str, own: Scaled, *, features: int = 0) -> Rows:
        """The words of all tokens. name: of the matrix; features: as of `Layout.gather`"""
        if self.token_shards == 1:
            return Done(own.words)
        assert self.group is not None, "several ranks have a group"
        # words by another recipe may have this shape, too: ranks must not take them for these
        what = f"gather of {name} in {own.format}, {self.recipe}"
        return start_rows(op, what, own.words, self.group, features, self.overlap)

    def rowwise(
        self,
        gathering: Rows,
        own: Scaled,
        widths: Sequence[int],
        dtype: torch.dtype,
        compute: Callable[[Scaled, list[Tensor]], None],
    ) -> list[Tensor]:
        """(tokens, width) of each width, of which `compute` writes the rows of each chunk as it arrives."""
        tokens, words = own.words.shape[0] * self.token_shards, own.words
        full = [words.new_empty(tokens, width, dtype=dtype) for width in widths]
        for rows, chunk in arrivals(gathering, self.overlap):
            compute(own.with_words(chunk), [rows_of(matrix, rows) for matrix in full])
        return full

    def sum_of_products(
        self,
        op: str,
        pairs: Sequence[tuple[Scaled, Scaled]],
        dtype: torch.dtype,
        *,
        bias: Tensor | None = None,
        hidden: bool = False,
    ) -> Pending:
        """Sums over ranks of the sum of these products, plus bias: of our tokens if split, or of all.

        hidden: as of `Layout.sum_of_products`
        """
        activations, weight = pairs[0]
        rows, cols = activations.words.shape[0], weight.words.shape[0]
        if self.group is None or self.group.size() == 1:
            return Done(_sum_of(pairs, dtype, bias))
        return start_sum(
            op,
            ScaledSum(pairs, dtype),
            rows,
            cols,
            activations.words.new_empty(0, dtype=dtype),
            self.group,
            scatter=self.sequence_parallel,
            overlap=self.overlap,
            bias=bias,
            features=0 if hidden else cols,
        )

    def weight_gradient(self, dy: Tensor, x: Tensor, into: Into) -> Tensor | None:
        """dyᵀ x, or None if it was added to a main_grad."""
        if self.recipe.wgrad == "bf16":
            return weight_gradient(dy, x, into)
        pairs = [(self.gradients(dy.t()), self.activations(x.t()))]
        gradient = _sum_of(pairs, dtype_of_gradient(x, into))
        if not isinstance(into, Tensor):
            return gradient
        into += gradient
        return None


def alone_by(op: str, recipe: Recipe) -> Span:
    """Of an op on one rank."""
    require_recipe(op, recipe)
    return Span(None, False, False, recipe)


@dataclass(frozen=True, slots=True)
class ScaledSum:
    """This rank's terms of a sum over ranks, of any rows, computed when they are asked for."""

    pairs: Sequence[tuple[Scaled, Scaled]]
    dtype: torch.dtype

    def __call__(self, rows: slice) -> Tensor:
        return _sum_of([(a.rows(rows), w) for a, w in self.pairs], self.dtype)


def _sum_of(pairs: Sequence[tuple[Scaled, Scaled]], dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """Of several, in fp32, and rounded once."""
    (first, weight), *others = pairs
    if not others:
        return product(first, weight, bias, "none", False, dtype)[0]
    assert bias is None, "only gradients add up products"
    total = product(first, weight, None, "none", False, torch.float32)[0]
    for other, weight in others:
        total += product(other, weight, None, "none", False, torch.float32)[0]
    return total.to(dtype)


def product(
    x: Scaled, weight: Scaled, bias: Tensor | None, activation: Activation, keep_z: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """act(x̂ ŵᵀ + bias), and what it is applied to on request."""
    return primitives.scaled_linear(
        x.data, weight.data, x.scale, weight.scale_of_squares, bias, activation, keep_z, word_of(dtype)
    )


def product_into(
    out: Sequence[Tensor],
    x: Scaled,
    weight: Scaled,
    bias: Tensor | None,
    activation: Activation,
    keep_z: bool,
) -> None:
    """out: y, and z if it is kept and not y"""
    operands = x.data, weight.data, x.scale, weight.scale_of_squares, bias, activation, keep_z
    primitives.into(primitives.scaled_linear, out, *operands, word_of(out[0].dtype))


def rounded(x: Scaled, dtype: torch.dtype) -> Tensor:
    """The numbers that it holds."""
    return primitives.dequantize(x.data, x.scale, word_of(dtype))


def word_of(dtype: torch.dtype) -> Wide:
    return cast("Wide", str(dtype).removeprefix("torch."))
