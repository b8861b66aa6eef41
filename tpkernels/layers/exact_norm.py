"""The exact norm of sharded tensors: its bits depend neither on the order of elements nor on their sharding.

Elements are scaled by a power of two, so that the largest lies in [1/2, 1). Their squares in float64, exact
for fp32 and narrower, are cut into limbs of 22 bits. Limbs are whole numbers, whose sums are exact in any
order. What lies below the last limb, 2**-88, is dropped: for 2**40 elements less than 2**-46 of the sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tpkernels.ops.replicas import from_all_ranks

LIMBS = 4
LIMB_BITS = 22  # sums of 2**41 limbs fit into an int64
CHUNK = 2**24  # elements: a chunk's sums fit into the 53 bits of a float64
CHUNK_ON_CPU = 2**16  # its copies fit into a cache, too
LEAST_EXPONENT = -1023  # below, 2.0**-exponent is no float64; only subnormals of float64 are so small


@torch.no_grad()
def exact_norm(tensors: Sequence[Tensor], device: torch.device, groups: Sequence[ProcessGroup]) -> float:
    """Return the norm of all ranks' elements, summed over the first group, then over the second, ...

    Called by all ranks of the groups, with different elements. Infinity or NaN among them is returned.
    """
    largest = _largest(tensors, device)
    for group in groups:
        largest = from_all_ranks(largest, group).amax(0)
    top = largest.item()
    if top == 0 or not math.isfinite(top):
        return top
    exponent = max(math.frexp(top)[1], LEAST_EXPONENT)
    limbs = _limbs(tensors, device, 2.0**-exponent)
    for group in groups:
        limbs = from_all_ranks(limbs, group).sum(0)
    total = 0
    for limb in limbs.tolist():
        total = (total << LIMB_BITS) + limb
    try:
        return math.ldexp(math.sqrt(total), exponent - LIMBS * LIMB_BITS // 2)
    except OverflowError:  # of float64 gradients
        return math.inf


def _largest(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """The largest magnitude, or NaN: (1,) in float64."""
    found = [tensor.abs().amax().double() for tensor in tensors if tensor.numel()]
    return torch.stack(found).amax()[None] if found else torch.zeros(1, dtype=torch.float64, device=device)


def _limbs(tensors: Sequence[Tensor], device: torch.device, scale: float) -> Tensor:
    """Sums of the limbs of squares: (LIMBS,) in int64, the highest first."""
    sums = torch.zeros(LIMBS, dtype=torch.int64, device=device)
    for chunk in _chunks(tensors):
        rest = chunk.double().mul(scale).square_()  # below 1; `double` of a float64 is no copy
        for limb in range(LIMBS):
            rest.mul_(2.0**LIMB_BITS)
            whole = rest.floor()
            rest.sub_(whole)
            sums[limb] += whole.sum().long()
    return sums


def _chunks(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    for tensor in tensors:
        yield from tensor.reshape(-1).split(CHUNK_ON_CPU if tensor.device.type == "cpu" else CHUNK)
