"""Checks of what layers cannot see: of a whole model on request, and of each step of an optimizer.

torch has hooks on steps for all optimizers of the process only. The first layer installs ours, and
`destroy_model_parallel` removes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from tpkernels.env import env_flag
from tpkernels.groups.state import at_destroy
from tpkernels.layers import replicas
from tpkernels.layers.batches import compare_inputs
from tpkernels.layers.optimizers import before_step, refuse_optimizer
from tpkernels.layers.world import TensorWorld
from tpkernels.layers.wrappers import refuse_ddp


def check(model: nn.Module, optimizer: object = None) -> None:
    """Raise for mistakes that layers of the model cannot see; compare the inputs of its later calls.

    model: the outermost module, as it is called: wrapped and compiled
    optimizer: of any class, also of none that torch knows

    Called by all ranks of the tensor-parallel group, before the first step. It finds

    - `DistributedDataParallel` over ranks that hold other shards;
    - an optimizer, or a wrapper, of parameters that `parallelize` has replaced;
    - an optimizer that takes a shard for the full parameter;
    - layers that were built with other segments of TP-invariance than others;
    - from now on, in some calls, inputs that differ between tensor-parallel ranks, such as masks.

    Without this call they are found in the first forward or step where layers see them; wrappers of a model
    that is compiled, optimizers that are not torch's, and inputs that no layer takes are found by it alone.
    With TPKERNELS_DEBUG=1 it is made in each model's first forward.
    """
    layers = layers_of(model)
    if not layers:
        raise ValueError(f"check: expected a model with tensor-parallel layers, got {type(model).__name__}")
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            refuse_ddp(module)
    if len(segments := sorted({layer.world.tp_invariant for layer in layers})) > 1:
        raise ValueError(
            f"check: expected layers with one number of segments of TP-invariance, got {segments} in one "
            "model: its bits would depend on the tensor-parallel size; call tpkernels.tp_invariant before "
            "they are built"
        )
    if optimizer is not None:
        named = {id(p): f"'{name}'" for name, p in model.named_parameters()}
        refuse_optimizer(optimizer, list(_parameters_in(_state_of(optimizer))), named)
    world: TensorWorld = layers[0].world
    if not _takes_shards(model):
        compare_inputs(model, world)


def layers_of(model: nn.Module) -> list[Any]:
    """Return the tensor-parallel layers in a model."""
    return [module for module in model.modules() if isinstance(getattr(module, "world", None), TensorWorld)]


def _takes_shards(model: nn.Module) -> bool:
    """Whether inputs of a model are shards: its layers take shards, and none of them makes any."""
    layers = [vars(module) for module in model.modules()]
    shared = [layer for layer in layers if layer.get("sequence_parallel") is True]
    makes_tokens = any("vocab_start_index" in layer for layer in shared)
    takes_features = any(layer.get("input_is_parallel") is True for layer in layers)
    makes_features = any(layer.get("gather_output") is False for layer in layers)
    return (bool(shared) and not makes_tokens) or (takes_features and not makes_features)


def _state_of(optimizer: object) -> object:
    return getattr(optimizer, "param_groups", None) or getattr(optimizer, "__dict__", {})


def _parameters_in(holder: object, depth: int = 6) -> Iterator[nn.Parameter]:
    """Yield parameters in nested lists and dicts, `depth` levels deep."""
    if isinstance(holder, nn.Parameter):
        yield holder
    if isinstance(holder, dict):
        inner: Iterable[object] = [*holder.keys(), *holder.values()]
    elif isinstance(holder, list | tuple | set):
        inner = list(holder)
    else:
        return
    if depth:
        for each in inner:
            yield from _parameters_in(each, depth - 1)


class _Installed:
    handles: ClassVar[list[RemovableHandle]] = []
    checked: ClassVar[WeakSet[nn.Module]] = WeakSet()


debug = env_flag("TPKERNELS_DEBUG", default=False)


def guard_training() -> None:
    """Install the hooks, unless they are; with TPKERNELS_DEBUG=1 `check` each model in its first call."""
    if _Installed.handles:
        return
    _Installed.handles.append(register_optimizer_step_pre_hook(before_step))
    if replicas.steps_between_checks:
        _Installed.handles.append(register_optimizer_step_post_hook(replicas.after_step))
    if debug:
        _Installed.handles.append(register_module_forward_pre_hook(_check_once))
    at_destroy(_remove)


def _remove() -> None:
    while _Installed.handles:
        _Installed.handles.pop().remove()


def _check_once(module: nn.Module, _: object) -> None:
    """Check a module, and with it all that are in it."""
    if not torch.compiler.is_compiling() and module not in _Installed.checked:
        _Installed.checked.update(module.modules())
        if layers_of(module):
            check(module)
