"""Tensors that replace a module's parameters in its forward, for example to sum gradients over ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from torch import Tensor, nn

from tpkernels.interop.parallelize.tokens import Tokens
from tpkernels.layers.world import TensorWorld
from tpkernels.ops.tensor_parallel.mappings import copy_to_region


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
