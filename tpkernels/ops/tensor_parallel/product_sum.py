"""Partial sums of an op: products of this rank's operands, for any rows, or for a kernel that takes all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from tpkernels.dispatch import primitives

Pair = tuple[Tensor, Tensor]  # activations (tokens, depth), and a weight (cols, depth) or (depth, cols)


@dataclass(frozen=True, slots=True)
class ProductSum:
    """`product_sum` of some rows, computed when they are asked for."""

    pairs: Sequence[Pair]
    transposed: bool

    def __call__(self, rows: slice) -> Tensor:
        return product_sum([(rows_of(a, rows), w) for a, w in self.pairs], transposed=self.transposed)

    def as_linear(self) -> tuple[Pair, ...]:
        """With weights as `linear` takes them, (cols, depth)."""
        return tuple((a, w if self.transposed else w.t()) for a, w in self.pairs)


def product_sum(pairs: Sequence[Pair], *, transposed: bool) -> Tensor:
    """a wᵀ if transposed, else Σ a w: of several, two at a time in one accumulator."""
    (a, w), *others = pairs
    if transposed:
        assert not others, "only gradients add up products"
        return primitives.linear(a, w, None, "none", False)[0]
    if not others:
        return primitives.dgrad(a, w)
    total = primitives.dgrad_pairs(a, w, *others[0])
    return total.add_(product_sum(others[1:], transposed=False)) if others[1:] else total


def rows_of(tensor: Tensor, rows: slice) -> Tensor:
    """tensor[rows], at once where that is all."""
    return tensor if rows.stop - rows.start == tensor.shape[0] else tensor[rows]
