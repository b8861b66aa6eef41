"""Memory that nobody in good faith gives an engine."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ELEMENTS = (32, 16)  # of the buckets of hostile.LAYOUT


def buckets() -> list[Tensor]:
    return [torch.zeros(elements) for elements in ELEMENTS]


def odd_buckets() -> list[Any]:
    """What may stand where flat tensors of ELEMENTS are expected."""
    both = torch.zeros(48)
    return [
        None,
        [],
        buckets()[:1],
        [*buckets(), torch.zeros(1)],
        buckets()[::-1],
        [torch.zeros(4, 8), torch.zeros(16)],
        [torch.zeros(64)[::2], torch.zeros(16)],
        [torch.zeros(32, requires_grad=True), torch.zeros(16)],
        [torch.zeros(32, dtype=torch.float64), torch.zeros(16)],
        [torch.zeros(32, device="meta"), torch.zeros(16)],
        [torch.zeros(32).to_sparse(), torch.zeros(16)],
        [both[:32], both[24:40]],
        [both[:32], both[32:]],
    ]


def memory_of(engine: Any) -> list[Any]:
    """What `meet` is given by a rank that is alone."""
    flats = engine.buckets()
    words = torch.zeros(2 * len(flats), dtype=torch.int64)
    return [[0], [torch.zeros(2, dtype=torch.int64)], [words], flats, "", [], 1000]


def odd_memory(good: Any) -> list[Any]:
    """What may stand where words, buckets or a time-out are expected."""
    if isinstance(good, int):
        return [0, -1, 2**62, None, "x"]
    if isinstance(good, str):
        return ["no such group", None, 3]
    odd = [torch.zeros(3), torch.zeros(0, dtype=torch.int64), torch.zeros(2, 2), torch.zeros(4).to_sparse()]
    return [None, [], [0], [1], [-1, 0], good * 2, good[:-1], *([tensor] * len(good) for tensor in odd)]
