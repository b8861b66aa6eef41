"""Parameters that all ranks keep, each of which sees its own features: gradients are summed in backward."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

from tpkernels.layers.world import TensorWorld
from tpkernels.ops.tensor_parallel.mappings import copy_to_region


class SummedGradients:
    """During a module's forward, these parameters of it pass `copy_to_region`.

    Nothing hangs on a parameter, which wrappers such as fully_shard replace: what is registered under its
    name at the time is taken, behind an attribute that hides it.
    """

    def __init__(self, names: tuple[str, ...], world: TensorWorld) -> None:
        self.names = names
        self.world = world

    def install(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self.enter)
        module.register_forward_hook(self.leave, always_call=True)

    def enter(self, module: nn.Module, _: Any) -> None:
        for name in self.names:
            parameter = module._parameters[name]
            if parameter is not None:
                copied = copy_to_region(parameter.reshape(-1), self.world.group).view(parameter.shape)
                object.__setattr__(module, name, copied)

    def leave(self, module: nn.Module, *_: Any) -> None:
        for name in self.names:
            vars(module).pop(name, None)


def sum_gradients(model: nn.Module, names: Collection[str], world: TensorWorld) -> None:
    """Let gradients of these parameters be summed over the ranks, in every backward."""
    chosen = {id(parameter) for name, parameter in model.named_parameters() if name in names}
    for module in model.modules():
        own = tuple(short for short, p in module._parameters.items() if p is not None and id(p) in chosen)
        if own:
            SummedGradients(own, world).install(module)
