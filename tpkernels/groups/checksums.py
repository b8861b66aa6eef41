"""Checksums of tensors, by which ranks compare what must be the same on all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

_COLUMNS = 1024  # words are summed in columns with weights, so that a sum depends on their positions


def sums_of_bits(tensors: Sequence[Tensor]) -> list[int]:
    """Return a checksum of each tensor that depends on each bit, and almost always on its position."""
    return sums_on_device(tensors).tolist()


@torch.no_grad()
def sums_on_device(tensors: Sequence[Tensor]) -> Tensor:
    """Return checksums (tensors,) without synchronization, on the first device that is not the CPU."""
    if not tensors:
        return torch.empty(0, dtype=torch.int64)
    device = next((tensor.device for tensor in tensors if not tensor.is_cpu), tensors[0].device)
    weights = {found: torch.arange(1, 2 * _COLUMNS, 2, device=found) for found in {t.device for t in tensors}}
    sums = [_sum_of_bits(tensor, weights[tensor.device]) for tensor in tensors]
    return torch.stack([total.to(device, non_blocking=True) for total in sums])


def _sum_of_bits(tensor: Tensor, weights: Tensor) -> Tensor:
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor.detach()  # of a DTensor
    octets = local.contiguous().resolve_neg().view(-1).view(torch.uint8)
    if octets.storage_offset() % 8 or len(octets) % 8:  # no view of whole words
        octets = F.pad(octets, (0, -len(octets) % 8)).clone()
    words = octets.view(torch.int64)
    rows = len(words) // _COLUMNS
    rest = words[rows * _COLUMNS :]
    total = (rest * weights[: len(rest)]).sum()
    if rows:
        total += (words[: rows * _COLUMNS].view(rows, _COLUMNS).sum(0) * weights).sum()
    return total
