"""What a plan does to a model on this rank: modules replaced, numbers divided, gradients summed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpkernels.interop.parallelize.hf_modules import is_conv1d, oriented_weight, replacement
from tpkernels.interop.parallelize.plan import Divided, Kept, Match, Plan, Split, matches
from tpkernels.layers.parallel_module import ParallelModule
from tpkernels.layers.world import State, TensorWorld
from tpkernels.ops.tensor_parallel.mappings import copy_to_region
from tpkernels.topology.shard import ranges_of, split_vocabulary


@dataclass(frozen=True)
class Work:
    """All that a plan does to one model.

    divisions: module, attribute, and this rank's share of the number in it
    kept: for each module that the plan keeps, whether gradients of its parameters are partial sums
    """

    swaps: list[Swap]
    divisions: list[tuple[nn.Module, str, int]]
    kept: dict[nn.Module, bool]


def planned(model: nn.Module, plan: Plan, world: TensorWorld) -> Work:
    """Changes nothing; a plan that does not fit is an error that names the module."""
    found = matches(model, plan)
    swaps = [_swap(match, world) for match in found if isinstance(match.entry, Split)]
    divisions = [_division(match, world.size) for match in found if isinstance(match.entry, Divided)]
    kept = {match.module: match.entry.partial for match in found if isinstance(match.entry, Kept)}
    _require_tied_alike(model, swaps)
    _require_called(model, swaps)
    return Work(swaps, divisions, kept)


@dataclass(frozen=True)
class Swap:
    """A module to be replaced.

    dim: the split dimension of the weight as (out_features, in_features)
    ranges: this rank's ranges of that dimension
    shard_size: of the shard along it, padding included
    """

    name: str
    old: nn.Module
    kind: str
    stacked: int
    dim: int
    ranges: tuple[range, ...]
    shard_size: int

    @property
    def features(self) -> int:
        """Size of the unsharded weight along the split dimension."""
        return oriented_weight(self.old).shape[self.dim]

    def shard_of(self, short: str, tensor: Tensor) -> Tensor:
        """This rank's shard of the old weight or bias, or of its gradient."""
        if short == "weight":
            return oriented_weight(self.old, self.shard(oriented_weight(self.old, tensor), self.dim))
        return tensor.clone() if self.kind == "row" else self.shard(tensor, 0)

    def shard(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's ranges of a dimension, padded, in memory of their own."""
        own = torch.cat([tensor.narrow(dim, each.start, len(each)) for each in self.ranges], dim)
        missing = self.shard_size - own.shape[dim]
        return F.pad(own, (*[0, 0] * (own.ndim - 1 - dim), 0, missing)) if missing else own


def _swap(match: Match, world: TensorWorld) -> Swap:
    name, old, entry = match.name, match.module, match.entry
    assert isinstance(entry, Split)
    _require_replaceable(name, old, entry.kind)
    shape = oriented_weight(old).shape
    dim = 1 if entry.kind == "row" else 0
    if entry.kind in ("head", "embedding"):
        split = split_vocabulary(shape[0], ranks=world.size)
        return Swap(name, old, entry.kind, 1, dim, (split.ids_of(world.rank),), split.shard_size)
    step = world.size * entry.unit * entry.stacked
    if shape[dim] % step:
        sizes = f"{world.size} ranks x unit {entry.unit} x stacked {entry.stacked}"
        raise ValueError(
            f"'{name}': expected {('out', 'in')[dim]}_features that {sizes} = {step} divides, got "
            f"{shape[dim]}"
        )
    ranges = ranges_of(world.rank, size=shape[dim], ranks=world.size, stride=entry.stacked)
    return Swap(name, old, entry.kind, entry.stacked, dim, ranges, shape[dim] // world.size)


def _require_replaceable(name: str, old: nn.Module, kind: str) -> None:
    expected: type[nn.Module] = nn.Embedding if kind == "embedding" else nn.Linear
    if type(old) is not expected and not (kind in ("column", "row") and is_conv1d(old)):
        advice = "; it is split already" if isinstance(old, ParallelModule) else ""
        raise TypeError(
            f"'{name}': expected an nn.{expected.__name__} for {kind!r}, got {type(old).__name__}{advice}"
        )
    if isinstance(old, nn.Embedding) and (old.max_norm is not None or old.scale_grad_by_freq or old.sparse):
        raise ValueError(
            f"'{name}': expected an nn.Embedding without max_norm, scale_grad_by_freq and sparse, got {old}"
        )
    hooks = old._forward_hooks or old._forward_pre_hooks or old._backward_hooks or old._backward_pre_hooks
    if hooks or "forward" in vars(old):
        raise ValueError(
            f"'{name}': expected a module without hooks or a forward of its own; add them after parallelize"
        )
    for short, parameter in old.named_parameters():
        if type(parameter) is not nn.Parameter:
            raise TypeError(f"'{name}.{short}': expected a plain parameter, got {type(parameter)}")


def _division(match: Match, ranks: int) -> tuple[nn.Module, str, int]:
    assert isinstance(match.entry, Divided)
    attribute = match.entry.attribute
    number = getattr(match.module, attribute, None)
    if type(number) is not int or number % ranks:
        raise ValueError(
            f"'{match.name}.{attribute}': expected a number that {ranks} ranks divide, got {number!r}"
        )
    return match.module, attribute, number // ranks


def _require_tied_alike(model: nn.Module, swaps: list[Swap]) -> None:
    """Modules that share a weight are split alike, all of them."""
    how = {swap.old: (swap.dim, swap.ranges, is_conv1d(swap.old)) for swap in swaps}
    owners: dict[int, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((name, module))
    for shared in owners.values():
        split = [(name, module) for name, module in shared if module in how]
        for name, module in shared:
            if split and how.get(module) != how[split[0][1]]:
                raise ValueError(
                    f"'{name}' shares a weight with '{split[0][0]}', and must be split as that is; give the "
                    "plan a pattern for both"
                )


def _require_called(model: nn.Module, swaps: list[Swap]) -> None:
    """In eval mode torch's encoder layer reads its layers' weights itself, and would take a shard for all."""
    for name, parent in model.named_modules():
        if isinstance(parent, nn.TransformerEncoderLayer):
            for swap in swaps:
                if any(module is swap.old for module in parent.modules()):
                    raise TypeError(
                        f"'{swap.name}': expected a module that its parent calls, but '{name}', an "
                        "nn.TransformerEncoderLayer, reads its weight; it cannot be split"
                    )


@torch.no_grad()
def carry_out(model: nn.Module, work: Work, state: State) -> None:
    """Divide the numbers and replace the modules, in place."""
    for module, attribute, number in work.divisions:
        setattr(module, attribute, number)
    made: dict[int, nn.Parameter] = {}
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        for short, child in parent._modules.items():
            if child is not None:
                places.setdefault(child, []).append((parent, short))
    for swap in work.swaps:
        new = replacement(swap.kind, swap.old, stacked=swap.stacked, state=state)
        for short, old in swap.old._parameters.items():
            if old is not None:
                held = nn.Parameter(swap.shard_of(short, old).contiguous(), requires_grad=old.requires_grad)
                setattr(new, short, made.setdefault(id(old), held))
        new.train(swap.old.training)
        for parent, short in places[swap.old]:
            parent._modules[short] = new


def sum_gradients(model: nn.Module, names: Collection[str], world: TensorWorld) -> None:
    """Sum gradients of these parameters over the ranks, in every backward."""
    chosen = {id(parameter) for name, parameter in model.named_parameters() if name in names}
    for module in model.modules():
        own = tuple(short for short, p in module._parameters.items() if p is not None and id(p) in chosen)
        if own:
            summed = _SummedGradients(own, world)
            module.register_forward_pre_hook(summed.enter)
            module.register_forward_hook(summed.leave, always_call=True)


class _SummedGradients:
    """During a module's forward, these parameters of it pass `copy_to_region`.

    Nothing is attached to a parameter, because wrappers such as fully_shard replace it: `enter` takes what
    the module has under its name at the time, and an attribute of that name hides it until `leave`.
    """

    def __init__(self, names: tuple[str, ...], world: TensorWorld) -> None:
        self.names = names
        self.world = world

    def enter(self, module: nn.Module, _: Any) -> None:
        for name in self.names:
            parameter = getattr(module, name)
            if parameter is not None:
                copied = copy_to_region(parameter.reshape(-1), self.world.group).view(parameter.shape)
                object.__setattr__(module, name, copied)

    def leave(self, module: nn.Module, *_: Any) -> None:
        for name in self.names:
            vars(module).pop(name, None)
