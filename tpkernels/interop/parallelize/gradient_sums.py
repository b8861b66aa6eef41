"""Gradients of replicated parameters that each rank has a part of, summed in every backward."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

from tpkernels.interop.parallelize.tokens import Tokens
from tpkernels.layers.world import TensorWorld
from tpkernels.ops.tensor_parallel.mappings import copy_to_region


def sum_gradients(
    model: nn.Module, names: Collection[str], world: TensorWorld, tokens: Tokens | None = None
) -> None:
    """Sum gradients of these parameters over the ranks, in every backward.

    tokens: if given, only when these are sharded
    """
    chosen = {id(parameter) for name, parameter in model.named_parameters() if name in names}
    for module in model.modules():
        own = tuple(short for short, p in module._parameters.items() if p is not None and id(p) in chosen)
        if own:
            summed = _SummedGradients(own, world, tokens)
            module.register_forward_pre_hook(summed.enter)
            module.register_forward_hook(summed.leave, always_call=True)


class _SummedGradients:
    """During a module's forward, these parameters of it pass `copy_to_region`.

    Nothing is attached to a parameter, because wrappers such as fully_shard replace it: `enter` takes what
    the module has under its name at the time, and an attribute of that name hides it until `leave`.
    """

    def __init__(self, names: tuple[str, ...], world: TensorWorld, tokens: Tokens | None) -> None:
        self.names = names
        self.world = world
        self.tokens = tokens

    def enter(self, module: nn.Module, _: Any) -> None:
        if self.tokens is not None and not self.tokens.sharded:
            return
        for name in self.names:
            parameter = getattr(module, name)
            if parameter is not None:
                copied = copy_to_region(parameter.reshape(-1), self.world.group).view(parameter.shape)
                object.__setattr__(module, name, copied)

    def leave(self, module: nn.Module, *_: Any) -> None:
        for name in self.names:
            vars(module).pop(name, None)
