"""Checksums of tensors, by which ranks tell whether they hold the same."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

_COLUMNS = 1024  # words are summed in columns with weights, so that a sum depends on their positions


@torch.no_grad()
def sums_of_bits(tensors: Sequence[Tensor]) -> list[int]:
    """Of each tensor a checksum that depends on each bit, and almost always on its position."""
    if not tensors:
        return []
    weights = torch.arange(1, 2 * _COLUMNS, 2, device=tensors[0].device)
    return torch.stack([_sum_of_bits(tensor, weights) for tensor in tensors]).tolist()


def _sum_of_bits(tensor: Tensor, weights: Tensor) -> Tensor:
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor.detach()  # of a DTensor
    octets = local.contiguous().view(-1).view(torch.uint8)
    if octets.storage_offset() % 8 or len(octets) % 8:  # no view of whole words
        octets = F.pad(octets, (0, -len(octets) % 8)).clone()
    words = octets.view(torch.int64).to(weights.device)
    rows = len(words) // _COLUMNS
    rest = words[rows * _COLUMNS :]
    total = (rest * weights[: len(rest)]).sum()
    if rows:
        total += (words[: rows * _COLUMNS].view(rows, _COLUMNS).sum(0) * weights).sum()
    return total
