"""What ranks run in tests of the memory that ops over a vocabulary take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ops.test_behaviour import saved_bytes
from tests.ops.vocab_behaviour import FEATURES, VOCAB
from tpkernels.ops import linear_cross_entropy, vocab_cross_entropy, vocab_embedding


def saved_when_eager_and_compiled() -> dict[str, tuple[int, int]]:
    """Bytes that each op keeps for backward, for VOCAB ids or columns and 12 tokens."""
    group, ids = dist.group.WORLD, torch.arange(12)
    hidden, weight = torch.randn(12, FEATURES), torch.randn(VOCAB, FEATURES)
    calls: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {
        "embedding": (lambda table: vocab_embedding(ids, table, group), [weight]),
        "cross_entropy": (lambda x: vocab_cross_entropy(x, ids, group), [torch.randn(12, VOCAB)]),
        "mean": (lambda x, w: linear_cross_entropy(x, w, ids, group), [hidden, weight]),
        "none": (lambda x, w: linear_cross_entropy(x, w, ids, group, reduction="none"), [hidden, weight]),
    }
    found = {}
    for name, (function, operands) in calls.items():
        torch._dynamo.reset()
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        leaves = [t.requires_grad_() for t in operands]
        compiled(*leaves)  # not counted: compiling
        found[name] = saved_bytes(function, *leaves), saved_bytes(compiled, *leaves)
    return found


class LiveBytes(TorchDispatchMode):
    """The most elements that any tensor made inside has, and the most bytes that live at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.peak = 0
        self._storages: WeakSet[Any] = WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for result in results if isinstance(results, tuple | list) else (results,):
            if isinstance(result, Tensor):
                self.largest = max(self.largest, result.numel())
                self._storages.add(result.untyped_storage())
        self.peak = max(self.peak, sum(storage.nbytes() for storage in self._storages))
        return results


def peak_of_head(reduction: str, tokens: int, vocab: int, chunk: int) -> dict[str, tuple[int, int]]:
    """(largest tensor in elements, peak in bytes) of the head by chunks, and of the pair of ops."""
    hidden, weight = torch.randn(tokens, FEATURES), torch.randn(vocab, FEATURES)
    target = torch.randint(vocab, (tokens,))
    group, found = dist.group.WORLD, {}

    def chunked(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, target, group, reduction=reduction, chunk_tokens=chunk)

    def pair(hidden: Tensor, weight: Tensor) -> Tensor:
        return vocab_cross_entropy(F.linear(hidden, weight), target, group)

    for name, function in (("chunked", chunked), ("pair", pair)):
        leaves = [t.clone().requires_grad_() for t in (hidden, weight)]
        with LiveBytes() as live:
            function(*leaves).sum().backward()
        found[name] = live.largest, live.peak
    return found
