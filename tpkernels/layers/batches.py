"""Checks that tensor-parallel ranks call a module with the same inputs; an error names those that differ.

If tensor-parallel ranks read different batches, their results are meaningless, yet replicas need not drift:
masks act between products. Ranks compare checksums of a module's input tensors in its first, second, fourth,
eighth, ... call, and in every 100th (TPKERNELS_CHECK_REPLICAS): of layers that take replicated inputs, of a
model that `parallelize` has split, and of one that `check` was given. Ops compare ids by themselves.

Tensors that may differ are not compared:

DTensors       their placements say what differs
activations    tensors that require gradients; in calls without gradients any floating ones, such as keys and
               values of this rank's heads
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from tpkernels.groups.checksums import sums_on_device
from tpkernels.groups.random import is_capturing
from tpkernels.groups.state import current_or_none
from tpkernels.layers.replicas import is_due
from tpkernels.layers.world import TensorWorld
from tpkernels.ops.replicas import agree_on_data, differs_between_ranks

_MOST_ELEMENTS = 2**22  # of one tensor that are compared
_DEEPEST = 6  # containers in containers


def compare_inputs(
    module: nn.Module,
    world: TensorWorld,
    *,
    shards: Collection[str] = (),
    until_activations: bool = False,
) -> None:
    """Compare the inputs of later calls of a module over its tensor-parallel ranks.

    shards: names of inputs that differ between ranks
    until_activations: stop when the module gets activations alone, as inside a model
    """
    if world.size > 1 and not any(isinstance(h, Batches) for h in module._forward_pre_hooks.values()):
        module.register_forward_pre_hook(Batches(world, shards, until_activations), with_kwargs=True)


@dataclass(eq=False)
class Batches:
    """A forward pre-hook of a module that compares its inputs between ranks in some calls."""

    _world: TensorWorld
    _shards: Collection[str]
    _until_activations: bool
    _calls: int = 0

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1:
            return  # traced, or recomputed in backward
        self._calls += 1
        if not is_due(self._calls) or is_capturing():
            return
        state = current_or_none()
        if state is not None and not set(self._world.ranks) <= set(state.ranks("tp")):
            return  # ranks of experts, for example, have batches of their own
        if named := [*_data_of(module, args, kwargs, self._shards)]:
            _compare(type(_unwrapped(module)).__name__, named, self._world.group)
        elif self._until_activations and torch.is_grad_enabled():
            for key in [key for key, hook in module._forward_pre_hooks.items() if hook is self]:
                del module._forward_pre_hooks[key], module._forward_pre_hooks_with_kwargs[key]

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_calls": 0}


@torch.no_grad()
def _compare(name: str, named: Sequence[tuple[str, Tensor]], group: ProcessGroup) -> None:
    """Raise the same error on all ranks if tensors differ. name: of the module"""
    described = [f"'{name}' {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in named]
    sums = sums_on_device([_some_of(tensor) for _, tensor in named])
    weights = torch.arange(1, 2 * len(named) + 1, 2, device=sums.device)
    if differs_between_ranks((sums * weights).sum() + zlib.crc32("\n".join(described).encode()), group):
        said = [
            f"{text} with checksum {total % 2**64:016x}"
            for text, total in zip(described, sums.tolist(), strict=True)
        ]
        agree_on_data(f"inputs of {name}", said, group)


def _data_of(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], shards: Collection[str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors of the inputs that must be the same on all ranks."""
    names = _names_of(_unwrapped(module))[: len(args)]
    names += [f"argument {number}" for number in range(len(names), len(args))]
    for name, value in chain(zip(names, args, strict=True), kwargs.items()):
        if name not in shards:
            yield from ((n, tensor) for n, tensor in _tensors_in(name, value, _DEEPEST) if _is_data(tensor))


def _names_of(module: nn.Module) -> list[str]:
    """The names of positional parameters of `forward`."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(module.forward).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind in kinds]


def _unwrapped(module: nn.Module) -> nn.Module:
    """The module inside wrappers, such as torch.compile's or DistributedDataParallel."""
    while not _names_of(module) and len(module._modules) == 1 and (inner := next(module.children(), None)):
        module = inner
    return module


def _tensors_in(name: str, value: object, depth: int) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
        return
    inner: Iterable[tuple[str, object]] = ()
    if isinstance(value, Mapping):
        inner = ((f"{name}[{key!r}]", each) for key, each in value.items())
    elif isinstance(value, list | tuple):
        inner = ((f"{name}[{number}]", each) for number, each in enumerate(value))
    elif is_dataclass(value):
        inner = ((f"{name}.{field.name}", getattr(value, field.name)) for field in fields(value))
    if depth:
        for longer, each in inner:
            yield from _tensors_in(longer, each, depth - 1)


def _is_data(tensor: Tensor) -> bool:
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:  # a DTensor, or no numbers at all
        return False
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False
    is_integral = not (tensor.is_floating_point() or tensor.is_complex())
    return not tensor.requires_grad and (is_integral or torch.is_grad_enabled())


def _some_of(tensor: Tensor) -> Tensor:
    """The tensor, or evenly spread elements of a huge tensor."""
    tensor = tensor.as_subclass(Tensor).detach().resolve_conj().resolve_neg()
    while (excess := -(-tensor.numel() // _MOST_ELEMENTS)) > 1:
        longest = max(range(tensor.ndim), key=tensor.size)
        tensor = tensor[(slice(None),) * longest + (slice(None, None, min(excess, tensor.size(longest))),)]
    return tensor
