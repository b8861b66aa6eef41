"""What stands for a module's parameters while its forward runs: tensors whose gradients are summed, say."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from torch import Tensor, nn

from tpkernels.interop.parallelize.tokens import Tokens
from tpkernels.layers.world import TensorWorld
from tpkernels.ops.tensor_parallel.mappings import copy_to_region


class StandIns:
    """Hides parameters of a module during its forward: attributes of their names hold what `make` returns.

    Nothing is attached to a parameter, because wrappers such as fully_shard replace it: `make` takes what the
    module has under its name at the time.

    make: called with the module and the name; None: the parameter is not hidden
    """

    def __init__(self, names: Iterable[str], make: Callable[[nn.Module, str], Tensor | None]) -> None:
        self.names = tuple(names)
        self.make = make

    def put_on(self, module: nn.Module, *, first: bool = False) -> None:
        """Register the hooks. first: before others, which see the stand-ins, too"""
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
    """Sum gradients of these parameters, of which each rank has a term, over the ranks in every backward.

    tokens: if given, only when these are sharded
    """
    chosen = {id(parameter) for name, parameter in model.named_parameters() if name in names}
    for module in model.modules():
        own = [short for short, p in module._parameters.items() if p is not None and id(p) in chosen]
        if own:
            StandIns(own, _Summed(world, tokens)).put_on(module)


class _Summed:
    """What stands for a parameter whose gradient is summed.

    An object, because a copy of the model has tokens of its own.
    """

    def __init__(self, world: TensorWorld, tokens: Tokens | None) -> None:
        self.world = world
        self.tokens = tokens

    def __call__(self, module: nn.Module, name: str) -> Tensor | None:
        parameter: Tensor | None = getattr(module, name)  # or what stands for it
        if parameter is None or (self.tokens is not None and not self.tokens.sharded):
            return None
        return copy_to_region(parameter.reshape(-1), self.world.group).view(parameter.shape)
