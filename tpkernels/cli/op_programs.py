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
from torch.nn.functional import cross_entropy, embedding, gelu, linear, silu

from tpkernels.ops import (
    column_linear,
    linear_cross_entropy,
    parallel_mlp,
    row_linear,
    vocab_cross_entropy,
    vocab_embedding,
)

Dim = int | Literal["tokens"] | None  # split over ranks; "tokens": the first, under sequence parallelism
Sides = tuple[str, Dim]  # sizes, and the split dimension
IDS = "ids"  # the operand with ids of the vocabulary, without gradient


@dataclass(frozen=True)
class OpProgram:
    """An op over a group, with sizes and split dimensions of its operands and of its result.

    op: takes this rank's shards, the group, and whether it is sequence-parallel
    exact: takes full operands
    """

    op: Callable[..., Tensor]
    exact: Callable[..., Tensor]
    operands: Mapping[str, Sides]
    result: Sides

    @property
    def by_tokens(self) -> bool:
        """Whether it can be sequence-parallel."""
        return "tokens" in [dim for _, dim in (*self.operands.values(), self.result)]

    def shapes(self, sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        """Return the full shape of each operand, by name, and of the result as "y"."""
        letters = {name: its for name, (its, _) in self.operands.items()} | {"y": self.result[0]}
        return {name: tuple(sizes[letter] for letter in its) for name, its in letters.items()}

    def results(
        self, full: Sequence[Tensor], group: ProcessGroup, split: bool, device: torch.device | None = None
    ) -> list[Tensor]:
        """Run forward and backward; return this rank's result, then the gradients of its operands.

        full: operands, and the gradient of the result
        split: sequence-parallel
        """
        dims = [dim for _, dim in self.operands.values()]
        *leaves, dy = (each.to(device) for each in _shards(full, [*dims, self.result[1]], group, split))
        return _with_gradients(partial(self.op, group=group, sequence_parallel=split), leaves, dy)

    def exact_results(self, full: Sequence[Tensor], group: ProcessGroup, split: bool) -> list[Tensor]:
        """Compute the same in float64, of full operands, and return this rank's shards."""
        *doubles, dy = (each.double() if each.is_floating_point() else each for each in full)
        dims = [self.result[1], *(dim for name, (_, dim) in self.operands.items() if name != IDS)]
        return _shards(_with_gradients(self.exact, doubles, dy), dims, group, split)


def _with_gradients(run: Callable[..., Tensor], leaves: Sequence[Tensor], dy: Tensor) -> list[Tensor]:
    wanted = [leaf.requires_grad_() for leaf in leaves if leaf.is_floating_point()]
    y = run(*leaves)
    return [y.detach(), *torch.autograd.grad(y, wanted, dy.to(y.dtype))]


def _shards(full: Sequence[Tensor], dims: Sequence[Dim], group: ProcessGroup, split: bool) -> list[Tensor]:
    """Return this rank's shard of each full tensor."""
    found = []
    for tensor, dim in zip(full, dims, strict=True):
        if dim == "tokens":
            dim = 0 if split else None
        shard = tensor if dim is None else tensor.chunk(group.size(), dim)[group.rank()].contiguous()
        found.append(shard.detach())
    return found


def _exact_up(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return gelu(linear(x, w, b), approximate="tanh")


_X: Sides = ("TF", "tokens")
_UP: Sides = ("BF", 0)
_DOWN: Sides = ("OB", 1)
_BIAS: Sides = ("B", 0)
_LOSS: dict[str, Sides] = {"hidden": _X, "w": ("VF", 0), IDS: ("T", None)}
OP_PROGRAMS: Mapping[str, OpProgram] = {
    "column_linear": OpProgram(
        partial(column_linear, activation="gelu_tanh"),
        _exact_up,
        {"x": _X, "w": _UP, "b": _BIAS},
        ("TB", 1),
    ),
    "row_linear": OpProgram(
        row_linear, linear, {"h": ("TB", 1), "w": _DOWN, "b": ("O", None)}, ("TO", "tokens")
    ),
    "parallel_mlp": OpProgram(
        lambda x, up, b, down, **how: parallel_mlp(x, up, b, down, None, **how),
        lambda x, up, b, down: linear(_exact_up(x, up, b), down),
        {"x": _X, "up": _UP, "b": _BIAS, "down": _DOWN},
        ("TO", "tokens"),
    ),
    "gated_mlp": OpProgram(
        lambda x, up, gate, down, **how: parallel_mlp(x, up, None, down, None, w_gate_shard=gate, **how),
        lambda x, up, gate, down: linear(silu(linear(x, gate)) * linear(x, up), down),
        {"x": _X, "up": _UP, "gate": _UP, "down": _DOWN},
        ("TO", "tokens"),
    ),
    "embedding": OpProgram(vocab_embedding, embedding, {IDS: ("T", None), "w": ("VF", 0)}, ("TF", "tokens")),
    "cross_entropy": OpProgram(
        lambda logits, ids, group, sequence_parallel: vocab_cross_entropy(logits, ids, group),
        partial(cross_entropy, reduction="none"),
        {"logits": ("TV", 1), IDS: ("T", None)},
        ("T", None),
    ),
    "linear_cross_entropy mean": OpProgram(
        partial(linear_cross_entropy, reduction="mean", chunk_tokens=5),
        lambda hidden, w, ids: cross_entropy(linear(hidden, w), ids),
        _LOSS,
        ("", None),
    ),
    "linear_cross_entropy none": OpProgram(
        partial(linear_cross_entropy, reduction="none", chunk_tokens=5),
        lambda hidden, w, ids: cross_entropy(linear(hidden, w), ids, reduction="none"),
        _LOSS,
        ("T", None),
    ),
}
