"""Small tensor-parallel programs, and what may be wrong in them without an error.

Each computes a loss from weights of which each rank has its shard. `fault` plants one of FAULTS: the program
runs, and has another loss, or other gradients, than on one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tpkernels import ops
from tpkernels.layers.attributes import Attributes
from tpkernels.ops.tensor_parallel import mappings

TOKENS, FEATURES, WIDTH, IDS = 4, 4, 16, 8
SPLIT = {"up": 0, "up_bias": 0, "down": 1, "table": 0}  # dimension that each is split along; others are full


class Weights(nn.Module):
    """This rank's parameters, marked as layers mark theirs; full with one rank."""

    up: nn.Parameter
    up_bias: nn.Parameter
    down: nn.Parameter
    down_bias: nn.Parameter
    scale: nn.Parameter
    table: nn.Parameter

    def __init__(self, rank: int, ranks: int, partial: tuple[str, ...] = ()) -> None:
        """partial: names of those whose gradients are of this rank's tokens"""
        super().__init__()
        draw = torch.Generator().manual_seed(3)
        shapes = {
            **{"up": (WIDTH, FEATURES), "up_bias": (WIDTH,), "down": (FEATURES, WIDTH)},
            **{"down_bias": (FEATURES,), "scale": (FEATURES,), "table": (IDS, FEATURES)},
        }
        for name, shape in shapes.items():
            full = torch.randn(shape, generator=draw, dtype=torch.float64)
            shard = full.chunk(ranks, SPLIT[name])[rank].clone() if name in SPLIT else full
            setattr(self, name, nn.Parameter(shard))
            marks = Attributes(name in SPLIT, SPLIT.get(name, -1), 1, name in partial)
            marks.put_on(getattr(self, name))


def inputs() -> tuple[Tensor, Tensor]:
    """x, and ids, the same on all ranks."""
    x = torch.randn(TOKENS, FEATURES, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    return x, torch.tensor([1, 6, 3, 4])


def by_regions(w: Weights, group: dist.ProcessGroup, alone: dist.ProcessGroup, fault: str) -> Tensor:
    """An MLP in Megatron's way, by torch's products between regions. alone: a group of this rank only"""
    x, _ = inputs()
    x = x * w.scale  # a parameter upstream, whose gradient needs the all-reduce of the copy
    h = x if fault == "copy left out" else mappings.copy_to_region(x, group)
    if fault == "copied twice":
        h = mappings.copy_to_region(h, group)
    h = F.gelu(F.linear(h, w.up, w.up_bias))
    if fault == "norm of a shard of features":
        h = F.rms_norm(h, h.shape[-1:])
    if fault == "norm with a split weight":
        h = F.layer_norm(h, h.shape[-1:], w.up_bias)
    if fault == "a replicated norm of split features":
        h = h * w.scale.repeat(h.shape[-1] // FEATURES)
    if fault == "residual added to a term":
        y = h @ w.down.t()
    else:
        y = F.linear(h, w.down, w.down_bias if fault == "bias before the sum" else None)
    if fault == "gelu of a term":
        y = F.gelu(y)
    if fault == "residual added to a term":
        y = y + x.detach()
    if fault != "sum left out":
        y = mappings.reduce_from_region(y, alone if fault == "sum over another group" else group)
    if fault == "summed twice":
        y = mappings.reduce_from_region(y, group)
    if fault != "bias before the sum":
        y = y + w.down_bias
    if fault == "output copied for a column layer that does not follow":
        y = mappings.copy_to_region(y, group)
    return y.square().mean()


def by_tokens(w: Weights, group: dist.ProcessGroup, alone: dist.ProcessGroup, fault: str) -> Tensor:
    """An MLP with sequence parallelism, by our ops."""
    x, _ = inputs()
    x = mappings.scatter_to_sequence_region(x, group)
    if fault == "column layer without gather":
        h = F.linear(
            mappings.gather_from_sequence_region(x * w.scale, group, tensor_parallel_output_grad=False), w.up
        )
    else:
        h = ops.column_linear(x * w.scale, w.up, w.up_bias, group, sequence_parallel=True)
    if fault == "softmax of split features":
        h = h.softmax(-1)
    if fault == "our norm of split features":
        h = ops.rms_norm(h * 2, w.up_bias)
    if fault == "replicated bias of split features":
        h = h + w.down_bias.repeat(h.shape[-1] // FEATURES)
    bias = None if fault == "bias of each rank's tokens" else w.down_bias
    y = ops.row_linear(F.gelu(h), w.down, bias, group, sequence_parallel=True)
    if fault == "bias of each rank's tokens":
        y = y + w.down_bias
    if fault == "loss of each rank's tokens":
        return y.square().mean()
    if fault == "sum of losses":
        return mappings.reduce_from_region(y.square().mean()[None], group)[0]
    terms = fault == "gather for a column layer that does not follow"
    y = mappings.gather_from_sequence_region(y, group, tensor_parallel_output_grad=terms)
    return y.square().mean()


def by_ids(w: Weights, group: dist.ProcessGroup, alone: dist.ProcessGroup, fault: str) -> Tensor:
    """An embedding tied to a head, by our ops."""
    _, ids = inputs()
    if fault == "rows of this rank's ids":
        hidden = F.embedding(ids.remainder(len(w.table)), w.table)
    else:
        hidden = ops.vocab_embedding(ids, w.table, group)
    hidden = hidden * w.scale
    if fault == "column layer after a copy":
        hidden = mappings.copy_to_region(hidden, group)
    if fault == "head without copy":
        logits = F.linear(hidden, w.table)
    else:
        logits = ops.column_linear(hidden, w.table, None, group)
    if fault == "loss of this rank's ids":
        return F.cross_entropy(logits, ids.remainder(logits.shape[1]))
    if fault == "loss of gathered ids, gathered twice":
        logits = mappings.gather_from_region(mappings.gather_from_region(logits, group), group)
        return F.cross_entropy(logits, ids)
    loss = ops.vocab_cross_entropy(logits, ids, group).mean()
    if fault == "loss summed over ranks":
        return mappings.reduce_from_region(loss[None], group)[0]
    if fault == "loss copied":
        return mappings.copy_to_region(loss[None], group)[0]
    return loss


Program = Callable[[Weights, dist.ProcessGroup, dist.ProcessGroup, str], Tensor]
PARTIAL: Mapping[Program, tuple[str, ...]] = {by_regions: (), by_tokens: ("scale",), by_ids: ()}
AT_LOSS = "program(weights"  # which backward begins from
FAULTS: Mapping[Program, Mapping[str, str]] = {  # with the start of the line that the checker names
    by_regions: {
        "copy left out": "h = F.gelu(",
        "copied twice": "h = mappings.copy_to_region(h",
        "a replicated norm of split features": "h = h * w.scale",
        "bias before the sum": "y = F.linear(h, w.down",
        "gelu of a term": "y = F.gelu(y)",
        "residual added to a term": "y = y + x",
        "norm of a shard of features": "h = F.rms_norm(h",
        "norm with a split weight": "h = F.layer_norm(h",
        "sum left out": "y = y + w.down_bias",
        "sum over another group": "y = y + w.down_bias",
        "summed twice": "y = mappings.reduce_from_region(y, group)",
        "output copied for a column layer that does not follow": AT_LOSS,
    },
    by_tokens: {
        "column layer without gather": "h = F.linear(",
        "softmax of split features": "h = h.softmax(-1)",
        "our norm of split features": "h = ops.rms_norm(h",
        "replicated bias of split features": "h = h + w.down_bias",
        "bias of each rank's tokens": "y = y + w.down_bias",
        "loss of each rank's tokens": AT_LOSS,
        "gather for a column layer that does not follow": AT_LOSS,
        "norm not marked": "h = ops.column_linear(x * w.scale",
    },
    by_ids: {
        "rows of this rank's ids": "hidden = hidden * w.scale",
        "column layer after a copy": "logits = ops.column_linear(hidden",
        "head without copy": "logits = F.linear(hidden",
        "loss of this rank's ids": AT_LOSS,
        "loss of gathered ids, gathered twice": "logits = mappings.gather_from_region(mappings",
        "loss summed over ranks": "return mappings.reduce_from_region(loss",
        "loss copied": AT_LOSS,
    },
}
# To local types a term of our ops is a shard: means may be summed.
NOT_SEEN: Mapping[Program, tuple[str, ...]] = {by_tokens: ("sum of losses",)}
CASES = [(program, fault) for program, faults in FAULTS.items() for fault in ("", *faults)]


def weights_of(program: Program, fault: str, rank: int, ranks: int) -> Weights:
    return Weights(rank, ranks, () if fault == "norm not marked" else PARTIAL[program])
