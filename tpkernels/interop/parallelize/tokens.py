"""Sequence parallelism of layers: hidden states are sharded over tokens from the first layer to the last.

R ranks; hidden states (..., S tokens, H features) are (..., S / R, H) between modules of a layer:

    where                                  forward                     backward
    before the first layer                 our shard of the tokens     all-gather
    column layers of a module              one all-gather              one reduce-scatter, one all-gather
    row layers                             reduce-scatter              all-gather
    before a module of any other kind      all-gather                  our shard: all ranks have the gradient
    after it                               our shard of the tokens     all-gather
    after the last layer                   all-gather                  our shard

Columns of a module, such as queries, keys and values, are computed before it is called, by one operator that
saves this rank's tokens for backward. The module gets NaN in the shape of the full hidden states, which only
its columns may read.

In eval mode tokens are not sharded if the ranks do not divide their number, as in a step of generation: then
every rank has all tokens, and row layers all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tpkernels import ops
from tpkernels.layers.world import TensorWorld
from tpkernels.ops.quantize import Recipe
from tpkernels.ops.tensor_parallel.mappings import (
    gather_from_sequence_region,
    scatter_to_sequence_region,
)


class Tokens:
    """Shards and gathers the tokens of a model's layers, if the current call shards them."""

    def __init__(self, world: TensorWorld) -> None:
        self.world = world
        self.sharded = False

    def begin(self, x: Tensor, layer: nn.Module) -> Tensor:
        """Decide whether this call shards tokens; return the first layer's input x, sharded if so."""
        count, ranks = x.shape[-2], self.world.size
        if count % ranks and layer.training:
            raise ValueError(
                f"sequence_parallel: expected a number of tokens that the {ranks} ranks divide, got {count} "
                f"in {tuple(x.shape)}; pad sequences to a multiple of {ranks}"
            )
        self.sharded = count % ranks == 0
        return self.own(x)

    def own(self, x: Tensor, _: object = None) -> Tensor:
        """Return this rank's tokens of a replicated x."""
        return _along_tokens(scatter_to_sequence_region, x, self.world) if self.sharded else x

    def all(self, x: Tensor, _: object = None) -> Tensor:
        """Return all tokens, for computation that is replicated."""
        return _along_tokens(_gather_replicated, x, self.world) if self.sharded else x

    def row_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, quantize: Recipe | None) -> Tensor:
        """(..., S, features of this rank) -> (..., S / R, out_features)"""
        group = self.world.group
        if not self.sharded:
            return ops.row_linear(x, weight, bias, group, quantize=quantize)
        first = x.transpose(0, -2)
        y = ops.row_linear(first, weight, bias, group, sequence_parallel=True, quantize=quantize)
        return y.transpose(0, -2).contiguous()


def _along_tokens(move: Callable[..., Tensor], x: Tensor, world: TensorWorld) -> Tensor:
    """Apply `move`, which works along dimension 0, along dimension -2; no copy for a batch of one."""
    return move(x.transpose(0, -2), world.group).transpose(0, -2).contiguous()


def _gather_replicated(x: Tensor, group: Any) -> Tensor:
    return gather_from_sequence_region(x, group, tensor_parallel_output_grad=False)


class Columns:
    """Computes the column layers that take their module's input."""

    def __init__(self, tokens: Tokens, layers: list[nn.Module]) -> None:
        self.tokens = tokens
        self.layers = layers

    def __call__(self, x: Tensor, _: nn.Module) -> Tensor:
        """Compute all layers; return the module's new input."""
        group, sharded = self.tokens.world.group, self.tokens.sharded
        pairs = [layer.weight_and_bias() for layer in self.layers]  # type: ignore[operator]
        weights, biases = [weight for weight, _ in pairs], [bias for _, bias in pairs]
        first = x.transpose(0, -2) if sharded else x
        recipe: Any = self.layers[0].quantize  # the same for all layers
        outputs = ops.column_linear(
            first,
            weights,
            biases,
            group,
            sequence_parallel=sharded,
            quantize=recipe,
        )
        for layer, output in zip(self.layers, outputs, strict=True):
            back = output.transpose(0, -2).contiguous() if sharded else output
            object.__setattr__(layer, READY, back)
        return x.new_full((), torch.nan).expand(*back.shape[:-1], x.shape[-1])


def ready(layer: nn.Module) -> Tensor:
    """Return the output that `Columns` computed for this call of the layer."""
    output: Tensor | None = vars(layer).pop(READY, None)
    if output is None:
        raise RuntimeError(
            f"sequence_parallel: expected one call of each {type(layer).__name__} in each call of the module "
            "that it was computed for, got another"
        )
    return output


READY = "_ready"
TokenMove = Callable[[Tensor, nn.Module], Tensor]


class Before:
    """A forward pre-hook that moves a module's first argument, positional or by name."""

    def __init__(self, move: TokenMove, name: str) -> None:
        self.move = move
        self.name = name

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (self.move(args[0], module), *args[1:]), kwargs
        return args, {**kwargs, self.name: self.move(kwargs[self.name], module)}


class After:
    """A forward hook that moves a module's output, or the first of several."""

    def __init__(self, move: TokenMove) -> None:
        self.move = move

    def __call__(self, module: nn.Module, _: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            return self.move(output, module)
        return (self.move(output[0], module), *output[1:])
