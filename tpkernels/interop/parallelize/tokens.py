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

Hooks are partials of functions, not closures: a copy of the model needs `Tokens` of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable
from functools import partial
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
            return ops.row_linear(x, weight, bias, group, quantize=quantize, tp_invariant=0)
        first = x.transpose(0, -2)
        y = ops.row_linear(
            first, weight, bias, group, sequence_parallel=True, quantize=quantize, tp_invariant=0
        )
        return y.transpose(0, -2).contiguous()


def _along_tokens(move: Callable[..., Tensor], x: Tensor, world: TensorWorld) -> Tensor:
    """Apply `move`, which works along dimension 0, along dimension -2; no copy for a batch of one."""
    return move(x.transpose(0, -2), world.group).transpose(0, -2).contiguous()


def _gather_replicated(x: Tensor, group: Any) -> Tensor:
    return gather_from_sequence_region(x, group, tensor_parallel_output_grad=False)


def compute_columns(tokens: Tokens, layers: list[nn.Module], x: Tensor, _: nn.Module) -> Tensor:
    """Compute the column layers that take their module's input x; return the module's new input."""
    group, sharded = tokens.world.group, tokens.sharded
    pairs = [layer.weight_and_bias() for layer in layers]  # type: ignore[operator]
    weights, biases = [weight for weight, _ in pairs], [bias for _, bias in pairs]
    first = x.transpose(0, -2) if sharded else x
    recipe: Any = layers[0].quantize  # the same for all layers
    outputs = ops.column_linear(
        first, weights, biases, group, sequence_parallel=sharded, quantize=recipe, tp_invariant=0
    )
    for layer, output in zip(layers, outputs, strict=True):
        back = output.transpose(0, -2).contiguous() if sharded else output
        object.__setattr__(layer, READY, back)
    return x.new_full((), torch.nan).expand(*back.shape[:-1], x.shape[-1])


def precomputed_output(layer: nn.Module) -> Tensor:
    """Return the output that `compute_columns` computed for this call of the layer."""
    output: Tensor | None = vars(layer).pop(READY, None)
    if output is None:
        raise RuntimeError(
            f"sequence_parallel: expected one call of each {type(layer).__name__} in each call of the module "
            "that it was computed for, got another"
        )
    return output


READY = "_ready"
TokenMove = Callable[[Tensor, nn.Module], Tensor]


def move_input(module: nn.Module, move: TokenMove) -> None:
    """Move a module's first argument, positional or by name, before its forward."""
    module.register_forward_pre_hook(partial(_before, move, first_argument(module)), with_kwargs=True)


def move_output(module: nn.Module, move: TokenMove) -> None:
    """Move a module's output, or the first of several."""
    module.register_forward_hook(partial(_after, move))


def first_argument(module: nn.Module) -> str:
    """Return the name of a module's first argument."""
    return next(iter(inspect.signature(module.forward).parameters), "")


def _before(
    move: TokenMove, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args:
        return (move(args[0], module), *args[1:]), kwargs
    return args, {**kwargs, name: move(kwargs[name], module)}


def _after(move: TokenMove, module: nn.Module, _: Any, output: Any) -> Any:
    if isinstance(output, Tensor):
        return move(output, module)
    return (move(output[0], module), *output[1:])


def put_stand_ins(
    module: nn.Module,
    names: Iterable[str],
    make: Callable[[nn.Module, str], Tensor | None],
    *,
    first: bool = False,
) -> None:
    """Replace parameters of a module during its forward by tensors that `make` returns.

    Nothing is attached to a parameter, because wrappers such as fully_shard replace it: `make` reads the
    module's current parameter.

    make: called with the module and the name; returns None to keep the parameter
    first: before other hooks, so that these see the stand-ins, too
    """
    names = tuple(names)
    module.register_forward_pre_hook(partial(_enter, names, make), prepend=first)
    module.register_forward_hook(partial(_leave, names), always_call=True)


def _enter(
    names: tuple[str, ...], make: Callable[[nn.Module, str], Tensor | None], module: nn.Module, _: Any
) -> None:
    for name in names:
        if (made := make(module, name)) is not None:
            object.__setattr__(module, name, made)


def _leave(names: tuple[str, ...], module: nn.Module, *_: Any) -> None:
    for name in names:
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
            put_stand_ins(module, own, partial(_summed, world, tokens))


def _summed(world: TensorWorld, tokens: Tokens | None, module: nn.Module, name: str) -> Tensor | None:
    """Return the stand-in of a parameter whose gradient is summed."""
    parameter: Tensor | None = getattr(module, name)  # or its stand-in
    if parameter is None or (tokens is not None and not tokens.sharded):
        return None
    return copy_to_region(parameter.reshape(-1), world.group).view(parameter.shape)
