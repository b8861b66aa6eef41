"""Refuses torch's data-parallel wrappers over ranks that hold different shards of a layer's weight.

Such a wrapper would average different rows, and no loss would show it. torch asks no module whether it may be
wrapped, so this is checked at three moments, all of them before the first step:

DistributedDataParallel     when it takes the module in, before it broadcasts the first rank's weights
FullyShardedDataParallel    when it takes the module in
fully_shard                 when it tells a module that its parameters are DTensors now

Refuses optimizers that are wrong on shards because they do not update each element by its gradients alone.

torch calls `before_step` before each step of each optimizer, wherever layers are used.
"""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from tpkernels.errors import warn
from tpkernels.layers.attributes import Attributes
from tpkernels.layers.world import TensorWorld
from tpkernels.ops.replicas import mixing_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


Shards = Iterator[tuple[str, tuple[int, ...]]]  # names, and which ranks hold shards of the same weight


def refuse_mesh(module: nn.Module, world: TensorWorld, *, holds_dtensors: bool) -> None:
    """Raise if fully_shard averages a parameter of `module` over ranks that hold other shards of it.

    holds_dtensors: parameters were DTensors over the tensor-parallel ranks before
    """
    for name, parameter in module._parameters.items():
        if is_dtensor(parameter):
            ranks = parameter.device_mesh.mesh.flatten().tolist()
            if holds_dtensors:  # a dimension of the mesh has the tensor-parallel ranks, others must have none
                groups = [_ranks_of(group) for group in parameter.device_mesh.get_all_groups()]
                ranks = sorted({rank for group in groups if group != list(world.ranks) for rank in group})
            _refuse([(f"{type(module).__name__}.{name}", world.ranks)], ranks, "fully_shard")


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    """Whether `tensor` is a DTensor; loads nothing."""
    module = sys.modules.get("torch.distributed.tensor")  # not imported: then there are none
    return module is not None and isinstance(tensor, module.DTensor)


def local_of(tensor: Tensor) -> Tensor:
    """The local tensor of a DTensor, or the tensor itself; detached."""
    if is_dtensor(tensor):
        tensor = tensor.to_local()
    return tensor.detach()


def is_split_over(ranks: Sequence[int], parameter: Tensor) -> bool:
    """Whether these tensor-parallel ranks hold shards of `parameter`, rather than replicas."""
    if Attributes.of(parameter).tensor_model_parallel:
        return True
    return any(_ranks_of(group) == list(ranks) for group in groups_with_blocks(parameter))


def groups_with_blocks(tensor: Tensor) -> list[ProcessGroup]:
    """The groups over which a DTensor is sharded; none for other tensors."""
    if not is_dtensor(tensor):
        return []
    held = zip(tensor.device_mesh.get_all_groups(), tensor.placements, strict=True)
    return [group for group, placement in held if not placement.is_replicate()]


def reshard(model: nn.Module) -> None:
    """Reshard a model under fully_shard, whose forward may have left parameters gathered."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not imported: then there is none
    for module in model.modules():
        if fsdp is not None and isinstance(module, fsdp.FSDPModule):
            module.reshard()


def look_at_wrapper(parent: nn.Module, _: str, module: nn.Module) -> None:
    """torch's hook for a module that becomes an attribute: raise if its parent averages different shards."""
    if isinstance(parent, DistributedDataParallel):
        ignored = parent.parameters_to_ignore
        shards = ((name, ranks) for name, ranks in _marked(module) if name not in ignored)
        _refuse(shards, _ranks_of(parent.process_group), "DistributedDataParallel")
        return
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and isinstance(parent, fsdp.FullyShardedDataParallel):
        known = vars(parent)  # its __getattr__ would ask its module, which it does not have yet
        ranks = [*_ranks_of(known.get("process_group")), *_ranks_of(known.get("_inter_node_pg"))]
        _refuse(_of_layers(module, known.get("_ignored_params", set())), ranks, "FullyShardedDataParallel")


def refuse_wrapped(caller: str, model: nn.Module) -> None:
    """Raise if a wrapper or an optimizer has parameters of `model`, which `caller` is about to replace."""
    wrapped, optimized = _held_in(model)
    if wrapped or optimized:
        gc.collect()  # what was dropped may still be part of a reference cycle
        wrapped, optimized = _held_in(model)
    if wrapped:
        raise ValueError(
            f"{caller}: expected a model that DistributedDataParallel has not wrapped, but it has wrapped "
            f"'{wrapped}', and would go on reducing the parameters that {caller} replaces; call {caller} "
            "first, then wrap the model over the data-parallel group"
        )
    if optimized:
        raise ValueError(
            f"{caller}: expected a model without optimizer, but an optimizer has '{optimized}', and would "
            f"keep the parameters that {caller} replaces; call {caller} first, then build the optimizer"
        )


def _held_in(model: nn.Module) -> tuple[str, str]:
    """Names of the first parameter that a wrapper has and of the first that an optimizer has; "" for none.

    Optimizers are objects of any class with a `step`, except modules. Types are checked before objects: a
    process has few types, and hundreds of thousands of objects.
    """
    objects = gc.get_objects()
    kinds = set(map(type, objects))
    wrappers = {kind for kind in kinds if issubclass(kind, DistributedDataParallel)}
    optimizers = {kind for kind in kinds if _is_optimizer(kind)}
    wanted = wrappers | optimizers
    wrapped: set[int] = set()
    optimized: set[int] = set()
    for found in (each for each in objects if type(each) in wanted):
        if type(found) in wrappers:
            wrapped.update(map(id, found.parameters()))
        else:
            optimized.update(map(id, _parameters_in(getattr(found, "__dict__", {}))))
    return _first_in(model, wrapped), _first_in(model, optimized)


def _first_in(model: nn.Module, parameters: set[int]) -> str:
    return next((name for name, parameter in model.named_parameters() if id(parameter) in parameters), "")


def _is_optimizer(kind: type) -> bool:
    return callable(getattr(kind, "step", None)) and not issubclass(kind, nn.Module)


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


def _refuse(shards: Iterable[tuple[str, tuple[int, ...]]], ranks: list[int], wrapper: str) -> None:
    for name, holders in shards:
        problem = mixing_of(name, holders, ranks, wrapper)
        if problem is not None:
            raise ValueError(problem)


def _marked(module: nn.Module) -> Shards:
    """Yield names and ranks of shards, by the attributes of parameters."""
    for name, parameter in module.named_parameters():
        attributes = Attributes.of(parameter)
        if attributes.tensor_model_parallel:
            yield name, attributes.tensor_parallel_ranks


def _of_layers(module: nn.Module, ignored: set[Tensor]) -> Shards:
    """Yield names and ranks of shards, layer by layer.

    Parameters may be views of a flat parameter by now, without attributes.
    """
    for prefix, layer in module.named_modules():
        world = getattr(layer, "world", None)
        if not isinstance(world, TensorWorld):
            continue
        for name, attributes in getattr(layer, "_attributes", {}).items():
            if attributes.tensor_model_parallel and layer._parameters.get(name) not in ignored:
                yield f"{prefix}.{name}".lstrip("."), world.ranks


def _ranks_of(group: Any) -> list[int]:
    return dist.get_process_group_ranks(group) if isinstance(group, ProcessGroup) else []


# By class name: torch's, and names that other packages use for the same mathematics.
ELEMENTWISE = {
    *("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "FusedAdam", "FusedSGD", "Lion", "NAdam"),
    *("RAdam", "RMSprop", "Rprop", "SGD"),
}
_WHY = {
    "Adafactor": "its factors are means over rows and columns, and it scales by the norm of the parameter",
    "LAMB": "it scales by the norms of the parameter and the update",
    "LARS": "it scales by the norms of the parameter and the gradient",
    "LBFGS": "its inner products are over all parameters",
    "Muon": "it orthogonalizes the matrix",
    "Shampoo": "its factors are products of the matrix with itself",
    "SOAP": "its factors are products of the matrix with itself",
    r"\dbit": "blocks of elements share a scale, and a shard has other blocks",
}
_looked_at: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()  # and their numbers of parameters


def before_step(optimizer: Optimizer, _: tuple[Any, ...], __: dict[str, Any]) -> None:
    """Raise if the optimizer is known to be wrong on its shards, and warn if it is not known."""
    if torch.compiler.is_compiling():
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if _looked_at.get(optimizer) == len(parameters):
        return
    shards = [parameter for parameter in parameters if _is_shard(parameter)]
    problem = problem_on_shards(optimizer, [f"a parameter of shape {tuple(shard.shape)}" for shard in shards])
    if problem and why_wrong(optimizer):
        raise ValueError(problem)
    if problem and ELEMENTWISE.isdisjoint(kind.__name__ for kind in type(optimizer).__mro__):
        warn(problem, stacklevel=3)
    _looked_at[optimizer] = len(parameters)


def problem_on_shards(optimizer: Optimizer, shards: Sequence[str]) -> str:
    """Why an optimizer is wrong, or not known to be right, on these shards; "" if it is right."""
    if not shards or is_elementwise(optimizer):
        return ""
    more = f" and {len(shards) - 1} more" * (len(shards) > 1)
    why = why_wrong(optimizer)
    said = "takes the shard for the full parameter" if why else "is not known here"
    return (
        f"{type(optimizer).__name__} has {shards[0]}{more}, of which each rank holds a shard, and {said}: "
        f"use an elementwise one, such as AdamW, or tpkernels.optim.Muon{f'; {why}' * bool(why)}. Right on "
        f"shards are {', '.join(sorted(ELEMENTWISE))}, and tpkernels.optim.Muon"
    )


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether an optimizer is elementwise by its class name, or is one of tpkernels.

    Optimizers of bitsandbytes are not: states of its AdamW may have 8 bits.
    """
    kind, module = type(optimizer).__name__, type(optimizer).__module__
    ours = module.startswith("tpkernels.")
    return ours or (kind in ELEMENTWISE and not module.startswith("bitsandbytes"))


def why_wrong(optimizer: Optimizer) -> str:
    """Why an optimizer is known to be wrong on shards; "" if it is not."""
    kind, module = type(optimizer).__name__, type(optimizer).__module__
    if module.startswith("bitsandbytes"):
        return _WHY[r"\dbit"]
    # whole words: "FusedLAMB", not "LambdaSGD"
    return next((why for word, why in _WHY.items() if re.search(rf"(?i:{word})(?![a-z])", kind)), "")


def _is_shard(parameter: Tensor) -> bool:
    known = vars(parameter)
    return bool(known.get("tensor_model_parallel")) and len(known.get("tensor_parallel_ranks", ())) > 1
