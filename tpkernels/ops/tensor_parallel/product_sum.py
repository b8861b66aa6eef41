"""A rank's partial sums as an object: products of its operands, computed for any rows when asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from tpkernels.dispatch import primitives

Pair = tuple[Tensor, Tensor]  # activations (tokens, depth), and a weight (cols, depth) or (depth, cols)


class Terms(Protocol):
    """A rank's terms of a sum over ranks, (rows, cols), computed when they are asked for.

    Called with a range of rows; the result may be overwritten.
    """

    @property
    def rows(self) -> int: ...

    @property
    def cols(self) -> int: ...

    @property
    def like(self) -> Tensor:
        """A tensor of the dtype and device in which terms are sent."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the sum."""

    def __call__(self, rows: slice) -> Tensor:
        """Compute the terms of some rows."""

    def alone(self, bias: Tensor | None) -> Tensor:
        """Compute the sum of a group of one rank, plus bias."""


class ProductSum:
    """Terms that are the sum of products of pairs, by `product_sum`."""

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
        """The pairs with weights as `linear` takes them, (cols, depth)."""
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
