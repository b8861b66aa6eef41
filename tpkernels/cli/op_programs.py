"""Ops over a group as programs: `qualify` compares them with float64, `bench bits` runs them delayed.

A program takes full operands, the same on all ranks, and each rank takes its shards of them. Operands and
result are written as letters of their sizes, in lower case for the dimension that is split over ranks:

    T tokens, t if sequence-parallel        F features          B, b features between two layers
    O out_features                          v rows of the vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

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

IDS = "ids"  # the operand with ids of the vocabulary, without gradient


@dataclass(frozen=True)
class OpProgram:
    """An op over a group, with letters of its operands by name, and of its result.

    op: takes this rank's shards, the group, and whether it is sequence-parallel
    exact: takes full operands
    """

    op: Callable[..., Tensor]
    exact: Callable[..., Tensor]
    operands: Mapping[str, str]
    result: str

    @property
    def by_tokens(self) -> bool:
        """Whether it can be sequence-parallel."""
        return any("t" in letters for letters in (*self.operands.values(), self.result))

    def shapes(self, sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        """Return the full shape of each operand, by name, and of the result as "y"."""
        named = {**self.operands, "y": self.result}
        return {name: tuple(sizes[each.upper()] for each in letters) for name, letters in named.items()}

    def results(
        self, full: Sequence[Tensor], group: ProcessGroup, split: bool, device: torch.device | None = None
    ) -> list[Tensor]:
        """Run forward and backward; return this rank's result, then the gradients of its operands.

        full: operands, and the gradient of the result
        split: sequence-parallel
        """
        shards = _shards(full, [*self.operands.values(), self.result], group, split)
        *leaves, dy = (shard.to(device) for shard in shards)
        return _with_gradients(partial(self.op, group=group, sequence_parallel=split), leaves, dy)

    def exact_results(self, full: Sequence[Tensor], group: ProcessGroup, split: bool) -> list[Tensor]:
        """Compute the same in float64, of full operands, and return this rank's shards."""
        *doubles, dy = (each.double() if each.is_floating_point() else each for each in full)
        letters = [self.result, *(letters for name, letters in self.operands.items() if name != IDS)]
        return _shards(_with_gradients(self.exact, doubles, dy), letters, group, split)


def _with_gradients(run: Callable[..., Tensor], leaves: Sequence[Tensor], dy: Tensor) -> list[Tensor]:
    wanted = [leaf.requires_grad_() for leaf in leaves if leaf.is_floating_point()]
    y = run(*leaves)
    return [y.detach(), *torch.autograd.grad(y, wanted, dy.to(y.dtype))]


def _shards(full: Sequence[Tensor], letters: Sequence[str], group: ProcessGroup, split: bool) -> list[Tensor]:
    """Return this rank's shard of each full tensor."""
    found = []
    for tensor, its in zip(full, letters, strict=True):
        dim = next((i for i, each in enumerate(its) if each.islower() and (split or each != "t")), None)
        shard = tensor if dim is None else tensor.chunk(group.size(), dim)[group.rank()].contiguous()
        found.append(shard.detach())
    return found


def _exact_up(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return gelu(linear(x, w, b), approximate="tanh")


OP_PROGRAMS: Mapping[str, OpProgram] = {
    "column_linear": OpProgram(
        partial(column_linear, activation="gelu_tanh"), _exact_up, {"x": "tF", "w": "bF", "b": "b"}, "Tb"
    ),
    "row_linear": OpProgram(row_linear, linear, {"h": "Tb", "w": "Ob", "b": "O"}, "tO"),
    "parallel_mlp": OpProgram(
        lambda x, up, b, down, **how: parallel_mlp(x, up, b, down, None, **how),
        lambda x, up, b, down: linear(_exact_up(x, up, b), down),
        {"x": "tF", "up": "bF", "b": "b", "down": "Ob"},
        "tO",
    ),
    "gated_mlp": OpProgram(
        lambda x, up, gate, down, **how: parallel_mlp(x, up, None, down, None, w_gate_shard=gate, **how),
        lambda x, up, gate, down: linear(silu(linear(x, gate)) * linear(x, up), down),
        {"x": "tF", "up": "bF", "gate": "bF", "down": "Ob"},
        "tO",
    ),
    "embedding": OpProgram(vocab_embedding, embedding, {IDS: "T", "w": "vF"}, "tF"),
    "cross_entropy": OpProgram(
        lambda logits, ids, group, sequence_parallel: vocab_cross_entropy(logits, ids, group),
        partial(cross_entropy, reduction="none"),
        {"logits": "Tv", IDS: "T"},
        "T",
    ),
    "linear_cross_entropy mean": OpProgram(
        partial(linear_cross_entropy, reduction="mean", chunk_tokens=5),
        lambda hidden, w, ids: cross_entropy(linear(hidden, w), ids),
        {"hidden": "tF", "w": "vF", IDS: "T"},
        "",
    ),
    "linear_cross_entropy none": OpProgram(
        partial(linear_cross_entropy, reduction="none", chunk_tokens=5),
        lambda hidden, w, ids: cross_entropy(linear(hidden, w), ids, reduction="none"),
        {"hidden": "tF", "w": "vF", IDS: "T"},
        "T",
    ),
}
