"""Initial weights that do not depend on how many ranks share them.

Every rank draws the whole weight, in fp32, from the default random stream, which is the same on all of them;
casts it, and keeps its part. So one seed gives one model, whatever the tensor-parallel size and dtype. The
whole weight is there for a moment: 4 bytes an element, on the device of the shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tpkernels.runtime.random import DEFAULT_STREAM, get_rng_tracker

InitMethod = Callable[[Tensor], Tensor | None]


@torch.no_grad()
def fill_shard(
    shard: Tensor,
    init_method: InitMethod,
    *,
    whole: tuple[int, int],
    dim: int,
    pieces: Sequence[range],
) -> Tensor | None:
    """Fill this rank's part of a weight; return the whole weight in fp32.

    init_method: fills the tensor it is given in place, or returns another of its shape
    whole: the shape that `init_method` sees
    pieces: of the whole along `dim`, which the shard holds one after the other; what is beyond them is zero

    On the meta device there is nothing to fill and nothing is drawn: None is returned.
    """
    if shard.is_meta:
        return None
    master = whole_weight(init_method, whole, shard.device)
    start = 0
    for piece in pieces:
        part = master.narrow(dim, piece.start, len(piece))
        shard.narrow(dim, start, len(piece)).copy_(part)
        start += len(piece)
    shard.narrow(dim, start, shard.shape[dim] - start).zero_()
    return master


@torch.no_grad()
def leave_unset(shard: Tensor, rows: int | None = None) -> None:
    """NaN instead of a weight: what is not loaded afterwards shows in the first loss. Nothing is drawn.

    rows: how many of the shard's rows are of the weight; the others are padding, and zero
    """
    shard[:rows].fill_(torch.nan)
    if rows is not None:
        shard[rows:].zero_()


def whole_weight(init_method: InitMethod, shape: tuple[int, int], device: torch.device) -> Tensor:
    """What `init_method` makes of an fp32 tensor, the same on all ranks that share the default stream."""
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
            f"init_method: expected a weight of shape {shape}, (out_features, in_features) of the whole "
            f"layer, got {got}; fill the tensor that it is given in place"
        )
    return made.to(device)
