"""Weights in fp8: quantized by each call, or once within `reuse_quantized_weights`.

No weight is taken for unchanged by itself. A version counter does not tell: `weight.data` has another one,
and wrappers that gather sharded weights write without counting.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tpkernels.dispatch import primitives
from tpkernels.kernels.recipe import Recipe
from tpkernels.kernels.scaled import Scaled


class _WeightCache:
    """Weights that are quantized already, while a `reuse_quantized_weights` is open; one a process.

    Weights are told apart by their storage, which is not held: an address would not do, since storages that
    are emptied, as FSDP does with what it has gathered, give theirs to others while they live.
    """

    def __init__(self) -> None:
        self._lock, self._depth = Lock(), 0
        self._found: dict[tuple[object, ...], tuple[int, Tensor]] | None = None  # version, words

    def open(self) -> None:
        with self._lock:
            self._depth += 1
            if self._depth == 1:
                self._found = {}

    def close(self) -> None:
        with self._lock:
            self._depth -= 1
            if not self._depth:
                self._found = None  # not cleared: another thread may be about to add to it

    def words(self, weight: Tensor, recipe: Recipe, transposed: bool) -> Tensor:
        found = self._found
        if found is None or weight.is_inference() or _is_captured(weight):
            return _quantized(weight, recipe, transposed)
        place = StorageWeakRef(weight.untyped_storage()), weight.storage_offset(), _stream_of(weight)
        key = *place, weight.shape, weight.stride(), weight.dtype, weight.is_neg(), recipe, transposed
        version, words = found.get(key, (-1, weight))
        if version != weight._version:
            version, words = weight._version, _quantized(weight, recipe, transposed)
            for other in [key for key in list(found) if key[0].expired()]:  # type: ignore[attr-defined]
                found.pop(other, None)  # casts of weights, which each call makes anew
            found[key] = version, words
        return words


_kept = _WeightCache()


@contextmanager
def reuse_quantized_weights() -> Iterator[None]:
    """Quantize each weight once inside the block, for all forwards and backwards: a step's microbatches, say.

    Weights must not change inside. Changes that torch counts (`weight.add_(...)`) are noticed
    nevertheless; those by `weight.data` are not.
    """
    _kept.open()
    try:
        yield
    finally:
        _kept.close()


def quantized_weight(weight: Tensor, recipe: Recipe, *, columns: bool) -> Scaled:
    """Quantize a weight (out_features, in_features) along its rows, as forward takes it.

    columns: along its columns, as dgrad takes it: (in_features, out_features)
    """
    words = _kept.words(weight, recipe, transposed=columns)
    return Scaled(words, weight.shape[0 if columns else 1], "e4m3", recipe.scaling)


def _quantized(weight: Tensor, recipe: Recipe, transposed: bool) -> Tensor:
    matrix = weight.detach().t() if transposed else weight.detach()
    square = recipe.scaling == "blocks"
    return primitives.quantize(matrix, None, "none", "e4m3", recipe.scaling, recipe.power_of_two, square)


def _is_captured(weight: Tensor) -> bool:
    """Whether a CUDA graph is captured, whose replays would go on reading what was quantized before."""
    return weight.is_cuda and torch.cuda.is_current_stream_capturing()


def _stream_of(weight: Tensor) -> int:
    """The current stream: on another one, weights that this one quantizes may not be there yet."""
    return torch.cuda.current_stream(weight.device).cuda_stream if weight.is_cuda else 0
