"""Applies a plan to a model on this rank: replaces modules, changes numbers, computes products in fp8."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tpkernels.groups.sizes import HeadSplit, split_vocabulary
from tpkernels.interop.parallelize.entries import tables
from tpkernels.interop.parallelize.hf_modules import (
    Cut,
    ModuleChange,
    is_conv1d,
    is_linear,
    oriented_shape,
    split_module,
    stacks_of,
)
from tpkernels.interop.parallelize.lora import is_factor, split_dropouts
from tpkernels.interop.parallelize.plan import (
    Divided,
    Kept,
    Match,
    Number,
    ParallelizePlan,
    Parameters,
    Shared,
    SharedHeads,
    Split,
    Tail,
    heads_read,
    matches,
)
from tpkernels.layers.parallel_module import ParallelModule
from tpkernels.layers.world import State, TensorWorld
from tpkernels.ops.quantize import Recipe
from tpkernels.ops.tensor_parallel.mappings import copy_to_region

QUANTIZED_KINDS = ("column", "row", "row_of_full", "shared_heads", "head")
# torch's attributes with hooks on a module's output, such as `enable_input_require_grads` adds to a table
_AFTER_FORWARD = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")


@dataclass(frozen=True)
class Changes:
    """All changes of one model by a plan.

    numbers: module, attribute, and its new number
    kept: for each module that the plan keeps, whether gradients of its parameters are partial
    tails: modules, and how many of their last output features go to this rank's heads
    shared: modules whose output each rank divides by the number of ranks
    """

    modules: list[ModuleChange]
    numbers: list[tuple[nn.Module, str, int]]
    kept: dict[nn.Module, bool]
    tails: list[tuple[nn.Module, int]]
    shared: list[nn.Module]

    def set_numbers(self) -> None:
        """Set the numbers in the attributes of their modules."""
        for module, path, number in self.numbers:
            *above, attribute = path.split(".")
            holder: Any = module
            for name in above:  # other modules hold the same config
                setattr(holder, name, copy(getattr(holder, name)))
                holder = getattr(holder, name)
            setattr(holder, attribute, number)

    @property
    def handled(self) -> set[int]:
        """Ids of the parameters whose gradients the replaced modules handle."""
        return {id(change.old._parameters[short]) for change in self.modules for short in change.cuts}


def planned(model: nn.Module, plan: ParallelizePlan, world: TensorWorld) -> Changes:
    """Return the changes of a model by a plan on this rank; raise if the plan does not fit a module."""
    changes = Changes([], [], {}, [], [])
    for match in matches(model, plan):
        module, entry = match.module, match.entry
        if isinstance(entry, Split):
            changes.modules.append(module_change(match.name, module, entry, world))
        elif isinstance(entry, SharedHeads):
            changes.modules.append(_shared_heads(match.name, module, entry, world))
        elif isinstance(entry, Parameters):
            changes.modules.append(_parameters(match.name, module, entry, world))
        elif isinstance(entry, Divided | Number):
            changes.numbers.extend(_numbers(match, entry, world.size))
        elif isinstance(entry, Tail):
            changes.tails.append((module, entry.features))
        elif isinstance(entry, Shared):
            changes.shared.append(module)
        else:
            assert isinstance(entry, Kept)
            changes.kept[module] = entry.partial
    _require_tied_alike(model, changes.modules)
    _require_called(model, changes.modules)
    return changes


def module_change(name: str, old: nn.Module, entry: Split, world: TensorWorld) -> ModuleChange:
    """Return the change of a module that is split; raise if the entry does not fit it."""
    kind = entry.kind
    _require_replaceable(name, old, kind)
    out_features, in_features = oriented_shape(old)
    if isinstance(old, nn.Embedding) and kind == "column":
        out_features = old.embedding_dim
    if kind in ("head", "embedding"):
        split = split_vocabulary(out_features, ranks=world.size)
        rows = Cut(0, (split.ids_of(world.rank),), split.shard_size, out_features)
        derived = isinstance(old, nn.Embedding) and type(old) is not nn.Embedding
        cuts = _cuts(old, weight=rows, bias=rows)
        return ModuleChange(name, old, "table" if derived else kind, cuts, split=split)
    size = in_features if kind.startswith("row") else out_features
    if entry.padded:
        return _padded(name, old, entry, size, world)
    stacks = stacks_of(size, entry.stacked)
    step = world.size * entry.unit
    if any(stack % step for stack in stacks) or sum(stacks) != size:
        side = "in" if kind.startswith("row") else "out"
        sizes = f"{world.size} ranks x unit {entry.unit}"
        if isinstance(entry.stacked, int):
            sizes, step = f"{sizes} x stacked {entry.stacked}", step * entry.stacked
            raise ValueError(f"'{name}': expected {side}_features that {sizes} = {step} divides, got {size}")
        raise ValueError(
            f"'{name}': expected stacked {entry.stacked} to add up to the {size} {side}_features, each a "
            f"multiple of {sizes} = {step}"
        )
    features = Cut.along(-1, stacks, world)
    uneven = stacks if len(set(stacks)) > 1 else ()  # equal sizes need a stride only
    return ModuleChange(name, old, kind, _cuts_along(features, old, kind), features, uneven)


def _padded(name: str, old: nn.Module, entry: Split, size: int, world: TensorWorld) -> ModuleChange:
    heads, rest = divmod(size, entry.unit)
    if rest or heads % entry.padded or world.size % entry.padded:
        raise ValueError(
            f"'{name}': expected features of complete heads of {entry.unit}, and padded={entry.padded} to "
            f"divide both their number and the {world.size} ranks, got {size} features"
        )
    if entry.kind not in ("column", "row") or not is_linear(old):
        raise ValueError(f"'{name}': expected an nn.Linear that is a column or a row for padded, got {old}")
    split = HeadSplit(heads, world.size, entry.padded, entry.unit)
    features = Cut(-1, (split.features_of(world.rank),), split.shard_size, size)
    cuts = _cuts_along(features, old, entry.kind)
    return ModuleChange(name, old, entry.kind, cuts, features, split=split)


def _cuts_along(features: Cut, old: nn.Module, kind: str) -> dict[str, Cut | None]:
    """Return the cuts of weight and bias, with split input features for a row, else split output features."""
    if kind.startswith("row"):
        return _cuts(old, weight=_at(features, old, 1), bias=None)
    return _cuts(old, weight=_at(features, old, 0), bias=replace(features, dim=0))


def _at(features: Cut, old: nn.Module, dim: int) -> Cut:
    """Return the cut of a weight (out_features, in_features) along `dim`, in the weight's own orientation."""
    turned = is_conv1d(old) or isinstance(old, nn.Embedding)
    return replace(features, dim=1 - dim if turned else dim)


def _cuts(old: nn.Module, **cuts: Cut | None) -> dict[str, Cut | None]:
    return {name: cut for name, cut in cuts.items() if old._parameters.get(name) is not None}


def _shared_heads(name: str, old: nn.Module, entry: SharedHeads, world: TensorWorld) -> ModuleChange:
    _require_replaceable(name, old, "column")
    heads, rest = divmod(oriented_shape(old)[0], entry.unit)
    if rest or not heads or entry.queries % heads or is_conv1d(old):
        raise ValueError(
            f"'{name}': expected an nn.Linear of complete heads of {entry.unit} features, whose number "
            f"divides {entry.queries} queries, got {old}"
        )
    read = heads_read(world.rank, heads=heads, queries=entry.queries, ranks=world.size)
    reads = tuple(head * entry.unit + i for head in read for i in range(entry.unit))
    return ModuleChange(name, old, "shared_heads", _cuts(old, weight=None, bias=None), reads=reads)


def _parameters(name: str, old: nn.Module, entry: Parameters, world: TensorWorld) -> ModuleChange:
    cuts: dict[str, Cut | None] = {}
    for short, dim, stacked in entry.split:
        parameter = old._parameters.get(short)
        if parameter is None or not -parameter.ndim <= dim < parameter.ndim:
            raise ValueError(f"'{name}': expected a parameter {short!r} with a dimension {dim}, got {old}")
        dim %= parameter.ndim
        size = parameter.shape[dim]
        if size % (world.size * stacked):
            raise ValueError(
                f"'{name}.{short}': expected a dimension {dim} that {world.size} ranks x stacked {stacked} = "
                f"{world.size * stacked} divides, got {tuple(parameter.shape)}"
            )
        cuts[short] = Cut.along(dim, stacks_of(size, stacked), world)
    for short, parameter in old._parameters.items():
        if entry.summed and parameter is not None and short not in cuts:
            if not short.endswith("bias"):
                raise ValueError(
                    f"'{name}.{short}': expected a bias, or an entry that splits it: ranks add what the "
                    "module computes"
                )
            cuts[short] = None
    return ModuleChange(name, old, "parameters", cuts, summed=entry.summed)


def _require_replaceable(name: str, old: nn.Module, kind: str) -> None:
    if not _fits(old, kind):
        expected = "nn.Embedding" if kind == "embedding" else "nn.Linear"
        advice = "; it is split already" if isinstance(old, ParallelModule) else ""
        raise TypeError(f"'{name}': expected an {expected} for {kind!r}, got {type(old).__name__}{advice}")
    if isinstance(old, nn.Embedding) and (old.max_norm is not None or old.scale_grad_by_freq or old.sparse):
        raise ValueError(
            f"'{name}': expected an nn.Embedding without max_norm, scale_grad_by_freq and sparse, got {old}"
        )
    after = {} if kind == "embedding" else old._forward_hooks
    hooks = after or old._forward_pre_hooks or old._backward_hooks or old._backward_pre_hooks
    if hooks or "forward" in vars(old):
        raise ValueError(
            f"'{name}': expected a module without hooks or a forward of its own; add them after parallelize"
        )
    for short, parameter in old.named_parameters():
        if type(parameter) is not nn.Parameter:
            raise TypeError(f"'{name}.{short}': expected a plain parameter, got {type(parameter)}")


def _fits(old: nn.Module, kind: str) -> bool:
    if isinstance(old, ParallelModule):
        return False
    if kind == "embedding":
        return isinstance(old, nn.Embedding)
    if kind == "column" and type(old) is nn.Embedding:
        return True
    return is_linear(old) or (kind in ("column", "row") and is_conv1d(old))


def _numbers(match: Match, entry: Divided | Number, ranks: int) -> Iterator[tuple[nn.Module, str, int]]:
    divided = isinstance(entry, Divided)
    for path in entry.attributes if isinstance(entry, Divided) else (entry.attribute,):
        number: Any = match.module
        for attribute in path.split("."):
            number = getattr(number, attribute, None)
        if type(number) is not int or (divided and number % ranks):
            expected = f"a number that {ranks} ranks divide" if divided else "a number"
            raise ValueError(f"'{match.name}.{path}': expected {expected}, got {number!r}")
        yield match.module, path, entry.value if isinstance(entry, Number) else number // ranks


def _require_tied_alike(model: nn.Module, changes: list[ModuleChange]) -> None:
    """Raise unless modules that share a weight are all split alike."""
    how = {change.old: change for change in changes}
    owners: dict[int, list[tuple[str, nn.Module, Cut | None]]] = {}
    for name, module in model.named_modules():
        for short, parameter in module._parameters.items():
            if parameter is not None:
                cut = how[module].cuts.get(short) if module in how else None
                owners.setdefault(id(parameter), []).append((name, module, cut))
    for shared in owners.values():
        split = [(name, cut) for name, module, cut in shared if module in how]
        for name, module, cut in shared:
            if split and (cut != split[0][1] or module not in how):
                raise ValueError(
                    f"'{name}' shares a weight with '{split[0][0]}', and must be split like it; give the "
                    "plan a pattern for both"
                )


def _require_called(model: nn.Module, changes: list[ModuleChange]) -> None:
    """Raise for layers of torch's encoder layer: in eval mode it reads their weights itself, as full ones."""
    for name, parent in model.named_modules():
        if isinstance(parent, nn.TransformerEncoderLayer):
            for change in changes:
                if any(module is change.old for module in parent.modules()):
                    raise TypeError(
                        f"'{change.name}': expected a module that its parent calls, but '{name}', an "
                        "nn.TransformerEncoderLayer, reads its weight; it cannot be split"
                    )


@torch.no_grad()
def carry_out(model: nn.Module, changes: Changes, world: TensorWorld, state: State) -> None:
    """Change the numbers and replace the modules, in place."""
    changes.set_numbers()
    made: dict[int, nn.Parameter] = {}
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        for short, child in parent._modules.items():
            if child is not None:
                places.setdefault(child, []).append((parent, short))
    for change in changes.modules:
        new = split_with_shards(change, state, made)
        for hooks in _AFTER_FORWARD if change.kind == "embedding" else ():  # its output is the old one's
            vars(new)[hooks] = vars(change.old)[hooks]
        if new is not change.old:
            for parent, short in places[change.old]:
                parent._modules[short] = new
                if change.kind == "row" and short == "base_layer":
                    assert change.features is not None
                    split_dropouts(parent, change.features)
    for module, features in changes.tails:
        module.register_forward_hook(partial(_sum_tail, features, world))
    for module in changes.shared:
        module.register_forward_hook(partial(_own_share, world))


def split_with_shards(change: ModuleChange, state: State, made: dict[int, nn.Parameter]) -> nn.Module:
    """Return the split module with this rank's shards; made: shards of the model by ids of parameters."""
    held = {short: _shard_once(change, short, made) for short in change.cuts}
    new = split_module(change, state)
    for short, parameter in held.items():
        setattr(new, short, parameter)
    return new.train(change.old.training)


def _shard_once(change: ModuleChange, short: str, made: dict[int, nn.Parameter]) -> nn.Parameter:
    """Return this rank's shard of a parameter, the same object for all modules that share it."""
    old = change.old._parameters[short]
    assert old is not None
    if id(old) not in made:
        made[id(old)] = nn.Parameter(
            change.shard_of(short, old).contiguous(), requires_grad=old.requires_grad
        )
    return made[id(old)]


def _sum_tail(features: int, world: TensorWorld, _: nn.Module, __: Any, output: Tensor) -> Tensor:
    """A forward hook: backward sums gradients of the last features over ranks: see `Tail`."""
    full, own = output.split([output.shape[-1] - features, features], -1)
    return torch.cat([full, copy_to_region(own, world.group)], -1)


def _own_share(world: TensorWorld, _: nn.Module, __: Any, output: Tensor) -> Tensor:
    """A forward hook that divides an output by the number of ranks: every rank adds the same to a sum."""
    return output / world.size


def quantizable(model: nn.Module, changes: Changes, recipe: Recipe) -> list[str]:
    """Return names of the layers that will compute in fp8; raise if there are none.

    nn.Linear that is split as column, row or row_of_full, shared heads    yes
    the head: an output that is gathered, or as wide as the vocabulary     with `Recipe(..., head=True)`
    a layer with LoRA                                                      yes, and its factors no
    experts in one parameter, embeddings, what every rank keeps            no
    """
    named = [change.old for change in changes.modules if change.kind in ("embedding", "table")]
    weights = [getattr(table, "weight", None) for table in [*tables(model), *named]]
    vocabularies = {weight.shape[0] for weight in weights if isinstance(weight, Tensor)}
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]

    def is_head(change: ModuleChange) -> bool:
        inside = any(change.name.startswith(f"{name}.") for name in lists)  # of layers, which may be as wide
        wide = change.kind == "column" and not inside and oriented_shape(change.old)[0] in vocabularies
        return change.kind == "head" or wide

    names = [
        change.name
        for change in changes.modules
        if change.kind in QUANTIZED_KINDS
        and not isinstance(change.old, nn.Embedding)
        and not is_factor(model, change.name)
        and (recipe.head or not is_head(change))
    ]
    if not names:
        raise ValueError(
            "quantize: expected a plan that splits linear layers other than the head, got none; leave out "
            "quantize"
        )
    return names


def quantize_products(model: nn.Module, names: list[str], recipe: Recipe) -> None:
    """Let the replaced layers of these names compute in fp8."""
    for name in names:
        layer: Any = model.get_submodule(name)
        layer.quantize = recipe
