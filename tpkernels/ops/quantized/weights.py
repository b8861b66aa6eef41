"""Weights in fp8: quantized by each call, or once within `reuse_quantized_weights`.

No weight is taken for unchanged by itself. A version counter does not tell: `weight.data` has another one,
and wrappers that gather sharded weights write without counting.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from tpkernels.dispatch import primitives
from tpkernels.kernels.recipe import Recipe
from tpkernels.kernels.scaled import Scaled

Key = tuple[object, ...]


class _Kept:
    """What is quantized already, while some `reuse_quantized_weights` is open. A process has one."""

    def __init__(self) -> None:
        self.depth = 0
        self._found: dict[Key, tuple[int, Tensor, Tensor]] = {}  # version, weight, words

    def words(self, weight: Tensor, recipe: Recipe, transposed: bool) -> Tensor:
        if not self.depth or weight.is_inference() or _is_captured(weight):
            return _quantized(weight, recipe, transposed)
        place = weight.untyped_storage().data_ptr(), weight.storage_offset()
        key = *place, weight.shape, weight.stride(), weight.dtype, recipe, transposed
        version, _, words = self._found.get(key, (-1, weight, weight))
        if version != weight._version:
            words = _quantized(weight, recipe, transposed)
            # the weight is held, so that no other one gets its place
            self._found[key] = weight._version, weight.detach(), words
        return words

    def clear(self) -> None:
        self._found.clear()


_kept = _Kept()


@contextmanager
def reuse_quantized_weights() -> Iterator[None]:
    """Quantize each weight once in here, for all forwards and backwards: those of a step's microbatches, say.

    You promise that weights do not change in here. Changes that torch counts (`weight.add_(...)`) are noticed
    nevertheless; those by `weight.data` are not.
    """
    _kept.depth += 1
    try:
        yield
    finally:
        _kept.depth -= 1
        if not _kept.depth:
            _kept.clear()


def rows_of_weight(weight: Tensor, recipe: Recipe) -> Scaled:
    """As forward takes it: (out_features, in_features)."""
    words = _kept.words(weight, recipe, transposed=False)
    return Scaled(words, weight.shape[1], "e4m3", recipe.scaling)


def columns_of_weight(weight: Tensor, recipe: Recipe) -> Scaled:
    """As the gradient of x takes it: (in_features, out_features)."""
    words = _kept.words(weight, recipe, transposed=True)
    return Scaled(words, weight.shape[0], "e4m3", recipe.scaling)


def _quantized(weight: Tensor, recipe: Recipe, transposed: bool) -> Tensor:
    matrix = weight.detach().t() if transposed else weight.detach()
    return primitives.quantize(
        matrix, "e4m3", recipe.scaling, recipe.power_of_two, recipe.scaling == "blocks"
    )


def _is_captured(weight: Tensor) -> bool:
    """A graph that is replayed would read what was quantized before, and not quantize anew."""
    return weight.is_cuda and torch.cuda.is_current_stream_capturing()
