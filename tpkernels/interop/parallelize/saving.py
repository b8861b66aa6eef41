"""A split model for the tools of others: `save_pretrained` of full weights, and parameters as DTensors.

`save_pretrained` and `push_to_hub` belong to the model's own library, and read `state_dict()`, which has this
rank's shards. So all ranks gather the full tensors on global rank 0, and rank 0 alone calls the library, with
a `state_dict()` that returns full tensors. For a PeftModel only the tensors that peft saves are gathered:
adapters and others.

For torch's own tools parameters are DTensors of the unsharded parameters:
    split along dimension d     Shard(d); without the rows that pad a vocabulary
    others                      Replicate

In a module's forward its parameters are the local tensors, padded again. Backward sums partial gradients over
the ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tpkernels.checkpoints.dtensor import is_chunked, over_mesh
from tpkernels.checkpoints.full_state_dict import full_state_dict
from tpkernels.checkpoints.raise_on_all_ranks import raise_on_all_ranks
from tpkernels.checkpoints.shards import TensorShard, shard_of, shards_of
from tpkernels.interop.parallelize.lora import base_model
from tpkernels.interop.parallelize.plan import ParallelizePlan, Parameters, SharedHeads, Split
from tpkernels.interop.parallelize.tokens import put_stand_ins
from tpkernels.layers.attributes import Attributes
from tpkernels.layers.parallel_module import ParallelModule
from tpkernels.layers.world import TENSOR_DIM, State, TensorWorld
from tpkernels.ops.tensor_parallel.mappings import copy_to_region


def require_mesh(state: State) -> None:
    """Raise unless parameters can be DTensors over `state`."""
    if not isinstance(state, DeviceMesh):
        raise ValueError(
            "as_dtensor=True: expected a DeviceMesh, as in parallelize(model, mesh, ...), from the mesh that "
            f"fully_shard gets another dimension of, got {type(state).__name__}"
        )


def require_dtensors(plan: ParallelizePlan) -> None:
    """Raise unless parameters split by `plan` can be DTensors."""
    for pattern, said in plan.items():
        for entry in said if isinstance(said, tuple) else (said,):
            if isinstance(entry, Split) and entry.stacked != 1:
                raise ValueError(_refusal(f"plan: {pattern!r}", f"{entry.stacked} weights stacked in one"))
            if isinstance(entry, Split) and entry.padded:
                raise ValueError(_refusal(f"plan: {pattern!r}", "heads that are padded"))
            if isinstance(entry, Parameters | SharedHeads):
                raise ValueError(_refusal(f"plan: {pattern!r}", f"a {type(entry).__name__}"))


@torch.no_grad()
def hold_dtensors(model: nn.Module, state: State, world: TensorWorld) -> None:
    """Replace each parameter by a DTensor over the tensor-parallel dimension of `state`, a DeviceMesh."""
    assert isinstance(state, DeviceMesh)
    mesh = state if state.ndim == 1 else state[TENSOR_DIM]
    named = dict(model.named_parameters())
    owners = {name: model.get_submodule(name.rpartition(".")[0]) for name in named}
    shards = {name: shard_of(name, owners[name], p, world) for name, p in named.items()}
    for name, shard in shards.items():
        if shard.dim is not None and not is_chunked(shard):
            raise ValueError(_refusal(f"'{name}'", f"{shard.ranges} of its dimension {shard.dim}"))
    made = {id(p): _dtensor(shards[name], mesh) for name, p in named.items()}
    marked = {id(p) for p in named.values() if Attributes.of(p).sequence_parallel}
    for module in list(model.modules()):
        old = {short: p for short, p in module._parameters.items() if p is not None}
        for short, parameter in old.items():
            setattr(module, short, made[id(parameter)])
        if isinstance(module, ParallelModule):
            module.holds_dtensors = True
        if old:
            summed = frozenset(short for short, p in old.items() if id(p) in marked)
            shapes = {short: p.shape for short, p in old.items()}
            put_stand_ins(module, old, partial(_local_parameter, summed, shapes, world), first=True)


def _dtensor(shard: TensorShard, mesh: DeviceMesh) -> nn.Parameter:
    parameter = nn.Parameter(over_mesh(shard, mesh), requires_grad=shard.tensor.requires_grad)
    # backward sums it: finalize_gradients must not
    replace(Attributes.of(shard.tensor), sequence_parallel=False).put_on(parameter)
    return parameter


def _refusal(what: str, how: str) -> str:
    return (
        f"as_dtensor=True: {what}: expected weights with one range of rows or columns on each rank, as "
        f"DTensor's Shard, got {how}; leave as_dtensor out: tpkernels' clip_grad_norm_, dcp and "
        "full_state_dict take the model as it is, under fully_shard, too"
    )


def _local_parameter(
    summed: frozenset[str],
    shapes: Mapping[str, torch.Size],
    world: TensorWorld,
    module: nn.Module,
    name: str,
) -> Tensor:
    """Return the local tensor that replaces a module's DTensor in its forward.

    summed: names of parameters marked `sequence_parallel`: their gradients are partial
    shapes: of the local tensors, padding included
    """
    parameter: Tensor | None = module._parameters[name]
    if not isinstance(parameter, DTensor):
        raise TypeError(f"'{name}': expected a DTensor, as parallelize made it, got {type(parameter)}")
    local: Tensor = parameter.to_local()
    if name in summed:
        local = copy_to_region(local.reshape(-1), world.group).view(local.shape)
    missing = shapes[name][0] - local.shape[0] if local.ndim else 0
    return F.pad(local, (*[0, 0] * (local.ndim - 1), 0, missing)) if missing else local


_METHODS = ("save_pretrained", "push_to_hub")


def save_full_weights(model: nn.Module) -> None:
    """Make `save_pretrained` and `push_to_hub` of the model and of models in it write full weights.

    Afterwards all ranks of the world must call them; they return when the files are written.
    """
    for name, module in model.named_modules():
        for method in _METHODS:
            if callable(getattr(type(module), method, None)):
                setattr(module, method, partial(_by_first_rank, module, method))
        if _COPIES in name and isinstance(module, ParallelModule):
            module._is_saved_whole = True


_COPIES = ".modules_to_save."  # in the names of the layers that a PeftModel has copied, to train all of them


def refuse_copies_of_shards(model: nn.Module) -> None:
    """Make copies that peft will make of split layers refuse `state_dict()`, which its own saving calls.

    Until `save_full_weights` has seen them. `state_dict(keep_vars=True)` is this rank's shards as ever.
    """
    for module in model.modules():
        if isinstance(module, ParallelModule) and module.world.size > 1:
            module.register_state_dict_pre_hook(_refuse_copy)  # type: ignore[no-untyped-call]


def _refuse_copy(module: ParallelModule, prefix: str, keep_vars: bool) -> None:
    if _COPIES in prefix and not keep_vars and not getattr(module, "_is_saved_whole", False):
        raise RuntimeError(
            f"state_dict: '{prefix[:-1]}' is this rank's shard, which peft would save as the whole layer; "
            "call tpkernels.interop.peft.save_full_weights(model) after get_peft_model"
        )


def refuse_to_save_shards(*_: object, **__: object) -> NoReturn:
    """The `save_pretrained` of an adapter's configuration, which peft calls after it has written tensors."""
    raise RuntimeError(
        "save_pretrained: the files hold this rank's shards of the adapter; remove them, and call "
        "tpkernels.interop.peft.save_full_weights(model) after get_peft_model(model, on_shards(config))"
    )


def _by_first_rank(module: nn.Module, method: str, *args: Any, **named: Any) -> Any:
    """Call the library's method on global rank 0 with full tensors; return its result there."""
    request = f"{type(module).__name__}.{method}"
    has_adapters = base_model(module) is not module
    names: Collection[str] | None = None
    with raise_on_all_ranks(request):
        if named.get("distributed_checkpoint"):
            raise ValueError(
                "distributed_checkpoint=True is for models that transformers has split itself; use "
                "tpkernels.checkpoints.dcp.save"
            )
        _require_full(module, named.get("state_dict"))
        if has_adapters and _is_first_rank():
            names = _read_by_peft(module, method, *args, **named)
    if has_adapters and dist.is_initialized():
        said = [names]
        dist.broadcast_object_list(said)
        names = said[0]
    full = full_state_dict(module, names=names)
    returned = None
    with raise_on_all_ranks(request):
        if _is_first_rank():
            with _unsharded(module, full):
                returned = getattr(module, method)(*args, **named)
    return returned


def _is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _read_by_peft(module: Any, method: str, *args: Any, **named: Any) -> set[str]:
    """Return the first names of the tensors that the PeftModel's `method` will write."""
    from peft import get_peft_model_state_dict  # type: ignore[import-not-found]

    said: dict[str, Any] = {}
    if method == "save_pretrained":
        said = inspect.signature(type(module).save_pretrained).bind(module, *args, **named).arguments
    if said.get("path_initial_model_for_weight_conversion") is not None:
        raise ValueError(
            "path_initial_model_for_weight_conversion: expected None, because it loads full factors into a "
            "model of shards; leave it out, and convert the saved files on an unsharded model"
        )
    held = module.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    for name, tensor in held.items():
        first.setdefault(id(tensor), name)
    selected = said.get("selected_adapters") or module.peft_config
    tables = said.get("save_embedding_layers", "auto")
    read = [
        get_peft_model_state_dict(module, state_dict=held, adapter_name=name, save_embedding_layers=tables)
        for name in module.peft_config
        if name in selected
    ]
    return {first[id(tensor)] for each in read for tensor in each.values() if id(tensor) in first}


def _require_full(module: nn.Module, given: Mapping[str, Tensor] | None) -> None:
    shards = shards_of(module)
    for name, tensor in (given or {}).items():
        if name in shards and tuple(tensor.shape) != shards[name].shape:
            raise ValueError(
                f"state_dict has '{name}' of {tuple(tensor.shape)}, expected the full tensor's "
                f"{shards[name].shape}; leave state_dict out, and full tensors are gathered"
            )


@contextmanager
def _unsharded(module: nn.Module, full: Mapping[str, Tensor]) -> Iterator[None]:
    """Restore the library's methods inside the block, and let `state_dict` return full tensors."""
    named = _under_all_names(module, full)
    shown: dict[str, Callable[..., Any]] = {"state_dict": lambda *_, **__: dict(named)}
    if callable(getattr(type(module), "num_parameters", None)):  # for the index of several files
        count = sum(full[name].numel() for name, _ in module.named_parameters())
        shown["num_parameters"] = lambda *_, **__: count
    hidden = {name: vars(module).pop(name) for name in _METHODS if name in vars(module)}
    before = {name: vars(module)[name] for name in shown if name in vars(module)}
    configs = [vars(config) for config in getattr(module, "peft_config", {}).values()]
    refusing = [config for config in configs if config.pop("save_pretrained", None)]
    config = vars(getattr(module, "config", nn.Module()))
    asked = config.pop("distributed_config", None)  # with it, the library waits for all ranks
    vars(module).update(shown)
    try:
        yield
    finally:
        for name in shown:
            del vars(module)[name]
        vars(module).update(hidden | before)
        if asked is not None:
            config["distributed_config"] = asked
        for config in refusing:
            config["save_pretrained"] = refuse_to_save_shards


def _under_all_names(module: nn.Module, full: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return full tensors under all names of the unsharded model's `state_dict()`; tied ones share memory."""
    first: dict[int, str] = {}
    named = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if (original := first.setdefault(id(tensor), name)) in full:
            named[name] = full[original]
    return named
