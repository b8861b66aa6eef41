"""Ops over a group as programs: `qualify` compares them with float64, `bench bits` runs them delayed.

A program takes full operands, the same on all ranks, and each rank takes its shards of them. Letters are
sizes: T tokens, F features, B features between two layers, O out_features, V rows of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tpkernels.ops import (
    column_linear,
    linear_cross_entropy,
    parallel_mlp,
    row_linear,
    vocab_cross_entropy,
    vocab_embedding,
)

Dim = int | Literal["tokens"] | None  # split over ranks; "tokens": the first, under sequence parallelism
IDS = "ids"  # the operand with ids of the vocabulary, without gradient


@dataclass(frozen=True)
class OpProgram:
    """An op over a group, with sizes and split dimensions of its operands and of its result.

    run: takes this rank's shards, the group, and whether it is sequence-parallel
    """

    run: Callable[..., Tensor]
    operands: Mapping[str, tuple[str, Dim]]
    result: tuple[str, Dim]

    def shapes(self, sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        """Return the full shape of each operand, by name, and of the result as "y"."""
        letters = {name: its for name, (its, _) in self.operands.items()} | {"y": self.result[0]}
        return {name: tuple(sizes[letter] for letter in its) for name, its in letters.items()}

    def dims(self, sequence_parallel: bool) -> list[int | None]:
        """Return the dimension of each operand, and of the result, that is split over ranks."""
        split = [dim for _, dim in self.operands.values()] + [self.result[1]]
        tokens = 0 if sequence_parallel else None
        return [tokens if dim == "tokens" else dim for dim in split]

    def results(self, leaves: Sequence[Tensor], dy: Tensor, group: ProcessGroup, split: bool) -> list[Tensor]:
        """Run forward and backward; return this rank's result, then the gradients of its operands."""
        wanted = [leaf.requires_grad_() for leaf in leaves if leaf.is_floating_point()]
        y = self.run(*leaves, group, split)
        return [y.detach(), *torch.autograd.grad(y, wanted, dy.to(y.dtype))]


def shards(full: Sequence[Tensor], dims: Sequence[int | None], group: ProcessGroup) -> list[Tensor]:
    """Return this rank's shard of each full tensor; for dim None the full tensor."""
    ranks, rank = group.size(), group.rank()
    return [
        tensor.detach() if dim is None else tensor.detach().chunk(ranks, dim)[rank].contiguous()
        for tensor, dim in zip(full, dims, strict=True)
    ]


def _column(x: Tensor, w: Tensor, b: Tensor, group: ProcessGroup, split: bool) -> Tensor:
    return column_linear(x, w, b, group, activation="gelu_tanh", sequence_parallel=split)


def _row(h: Tensor, w: Tensor, b: Tensor, group: ProcessGroup, split: bool) -> Tensor:
    return row_linear(h, w, b, group, sequence_parallel=split)


def _mlp(x: Tensor, up: Tensor, b: Tensor, down: Tensor, group: ProcessGroup, split: bool) -> Tensor:
    return parallel_mlp(x, up, b, down, None, group, sequence_parallel=split)


def _gated_mlp(x: Tensor, up: Tensor, gate: Tensor, down: Tensor, group: ProcessGroup, split: bool) -> Tensor:
    return parallel_mlp(x, up, None, down, None, group, w_gate_shard=gate, sequence_parallel=split)


def _embedding(ids: Tensor, w: Tensor, group: ProcessGroup, split: bool) -> Tensor:
    return vocab_embedding(ids, w, group, sequence_parallel=split)


def _cross_entropy(logits: Tensor, ids: Tensor, group: ProcessGroup, split: bool) -> Tensor:
    return vocab_cross_entropy(logits, ids, group, label_smoothing=0.1)


def _linear_cross_entropy(
    reduction: Literal["mean", "none"],
    hidden: Tensor,
    w: Tensor,
    ids: Tensor,
    group: ProcessGroup,
    split: bool,
) -> Tensor:
    return linear_cross_entropy(
        hidden, w, ids, group, reduction=reduction, sequence_parallel=split, chunk_tokens=5
    )


_HEAD: dict[str, tuple[str, Dim]] = {"hidden": ("TF", "tokens"), "w": ("VF", 0), IDS: ("T", None)}
OP_PROGRAMS: Mapping[str, OpProgram] = {
    "column_linear": OpProgram(_column, {"x": ("TF", "tokens"), "w": ("BF", 0), "b": ("B", 0)}, ("TB", 1)),
    "row_linear": OpProgram(_row, {"h": ("TB", 1), "w": ("OB", 1), "b": ("O", None)}, ("TO", "tokens")),
    "parallel_mlp": OpProgram(
        _mlp, {"x": ("TF", "tokens"), "up": ("BF", 0), "b": ("B", 0), "down": ("OB", 1)}, ("TO", "tokens")
    ),
    "gated_mlp": OpProgram(
        _gated_mlp,
        {"x": ("TF", "tokens"), "up": ("BF", 0), "gate": ("BF", 0), "down": ("OB", 1)},
        ("TO", "tokens"),
    ),
    "embedding": OpProgram(_embedding, {IDS: ("T", None), "w": ("VF", 0)}, ("TF", "tokens")),
    "cross_entropy": OpProgram(_cross_entropy, {"logits": ("TV", 1), IDS: ("T", None)}, ("T", None)),
    "linear_cross_entropy mean": OpProgram(partial(_linear_cross_entropy, "mean"), _HEAD, ("", None)),
    "linear_cross_entropy none": OpProgram(partial(_linear_cross_entropy, "none"), _HEAD, ("T", None)),
}
