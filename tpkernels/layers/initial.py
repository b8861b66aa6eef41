"""Initial weights, the same for any number of ranks.

Every rank draws the full weight in fp32 from the default random stream, which is the same on all ranks, casts
it and keeps its shard. So one seed gives one model, whatever the tensor-parallel size and dtype. The full
weight takes 4 bytes an element for a moment, on the device of the shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tpkernels.groups.random import DEFAULT_STREAM, get_rng_tracker

InitMethod = Callable[[Tensor], Tensor | None]


@torch.no_grad()
def fill_shard(
    shard: Tensor,
    init_method: InitMethod,
    *,
    full: tuple[int, int],
    dim: int,
    ranges: Sequence[range],
) -> Tensor | None:
    """Fill this rank's shard of a weight; return the full weight in fp32.

    init_method: fills the tensor it is given in place, or returns another of its shape
    full: the shape that `init_method` sees
    ranges: of the full weight along `dim`, concatenated in the shard; the rest of the shard becomes zero

    On the meta device nothing is filled or drawn, and None is returned.
    """
    if shard.is_meta:
        return None
    master = _full_weight(init_method, full, shard.device)
    start = 0
    for each in ranges:
        shard.narrow(dim, start, len(each)).copy_(master.narrow(dim, each.start, len(each)))
        start += len(each)
    shard.narrow(dim, start, shard.shape[dim] - start).zero_()
    return master


@torch.no_grad()
def fill_with_nan(shard: Tensor, rows: int | None = None) -> None:
    """Fill a shard with NaN, so that a weight that is not loaded afterwards shows in the first loss.

    rows: how many of the shard's rows are not padding; padding becomes zero
    """
    shard[:rows].fill_(torch.nan)
    if rows is not None:
        shard[rows:].zero_()


def _full_weight(init_method: InitMethod, shape: tuple[int, int], device: torch.device) -> Tensor:
    """Draw the full weight in fp32, the same on all ranks that share the default stream."""
    master = torch.zeros(shape, dtype=torch.float32, device=device)
    with get_rng_tracker().fork(DEFAULT_STREAM):
        made = init_method(master)
    if made is None:
        made = master
    if not isinstance(made, Tensor):
        raise TypeError(
            f"init_method: expected a function that fills the tensor it is given, got {type(made).__name__} "
            "back; return the tensor, or nothing"
        )
    if made.shape != shape or master.shape != shape:
        got = tuple(made.shape if made.shape != shape else master.shape)
        raise ValueError(
            f"init_method: expected a weight of shape {shape}, (out_features, in_features) of the full "
            f"layer, got {got}; fill the tensor that it is given in place"
        )
    return made.to(device)
