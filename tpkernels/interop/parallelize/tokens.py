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


`StandIns` replace a module's parameters in its forward, for example to sum gradients over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tpkernels import ops
from tpkernels.layers.world import TensorWorld
from tpkernels.ops.quantize import Recipe
from tpkernels.ops.tensor_parallel.mappings import (
    copy_to_region,
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


def precomputed_output(layer: nn.Module) -> Tensor:
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


class StandIns:
    """Replaces parameters of a module during its forward by tensors that `make` returns.

    Nothing is attached to a parameter, because wrappers such as fully_shard replace it: `make` reads the
    module's current parameter.

    make: called with the module and the name; returns None to keep the parameter
    """

    def __init__(self, names: Iterable[str], make: Callable[[nn.Module, str], Tensor | None]) -> None:
        self.names = tuple(names)
        self.make = make

    def put_on(self, module: nn.Module, *, first: bool = False) -> None:
        """Register the hooks. first: before other hooks, so that these see the stand-ins, too"""
        module.register_forward_pre_hook(self._enter, prepend=first)
        module.register_forward_hook(self._leave, always_call=True)

    def _enter(self, module: nn.Module, _: Any) -> None:
        for name in self.names:
            if (made := self.make(module, name)) is not None:
                object.__setattr__(module, name, made)

    def _leave(self, module: nn.Module, *_: Any) -> None:
        for name in self.names:
            vars(module).pop(name, None)


def sum_gradients(
    model: nn.Module, names: Collection[str], world: TensorWorld, tokens: Tokens | None = None
) -> None:
    """Sum the partial gradients of these parameters over the ranks in every backward.

    tokens: if given, sum only while these are sharded
    """
    chosen = {id(parameter) for name, parameter in model.named_parameters() if name in names}
    for module in model.modules():
        own = [short for short, p in module._parameters.items() if p is not None and id(p) in chosen]
        if own:
            StandIns(own, _Summed(world, tokens)).put_on(module)


class _Summed:
    """Returns the stand-in of a parameter whose gradient is summed.

    An object, not a closure: a copy of the model needs `tokens` of its own.
    """

    def __init__(self, world: TensorWorld, tokens: Tokens | None) -> None:
        self.world = world
        self.tokens = tokens

    def __call__(self, module: nn.Module, name: str) -> Tensor | None:
        parameter: Tensor | None = getattr(module, name)  # or its stand-in
        if parameter is None or (self.tokens is not None and not self.tokens.sharded):
            return None
        return copy_to_region(parameter.reshape(-1), self.world.group).view(parameter.shape)
