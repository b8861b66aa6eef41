"""Loads a checkpoint of the unsharded model into the shards of a model from the meta device.

Files are mapped into memory, and each rank copies its shards: no rank holds the full model. All problems are
found on the unsharded model, before it is changed.

For a model of `transformers`, names and weights are converted by its own rules, as `from_pretrained` does,
when a tensor is read. Where weights are concatenated, such as those of experts, the result is `Joined`, and
slices of it are copied. Other conversions that move numbers, such as another order of rotary positions, make
one full tensor at a time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from tpkernels.checkpoints import safetensors
from tpkernels.checkpoints.full_state_dict import copy_shards
from tpkernels.checkpoints.shards import shards_of, some_names
from tpkernels.interop.parallelize.plan import listed
from tpkernels.interop.parallelize.trial import device_of, raise_alike
from tpkernels.layers.world import State, TensorWorld
from tpkernels.ops.replicas import unlike_first_rank

MOST = 20  # names, and lines, of an error


class Joined:
    """Tensors concatenated along a dimension; only slices are copied."""

    def __init__(self, tensors: Sequence[Tensor | Joined], dim: int) -> None:
        shapes = [tuple(tensor.shape) for tensor in tensors]
        self.tensors, self.dim = tensors, dim % len(shapes[0])
        self.dtype: torch.dtype = tensors[0].dtype
        others = {(*shape[: self.dim], *shape[self.dim + 1 :]) for shape in shapes}
        if len(others) > 1 or len({tensor.dtype for tensor in tensors}) > 1:
            raise ValueError(f"expected one dtype, and shapes that differ in dimension {dim} only")
        size = sum(shape[self.dim] for shape in shapes)
        self.shape: tuple[int, ...] = (*shapes[0][: self.dim], size, *shapes[0][self.dim + 1 :])

    def __getitem__(self, where: tuple[slice, ...]) -> Tensor:
        dim, first, last = self.dim, where[self.dim].start, where[self.dim].stop
        found: list[Tensor] = []
        offset = 0
        for tensor in self.tensors:
            size = tensor.shape[dim]
            low, high = min(max(first - offset, 0), size), min(max(last - offset, 0), size)
            if low < high or (first == last and not found):
                found.append(tensor[(*where[:dim], slice(low, high), *where[dim + 1 :])])
            offset += size
        return torch.cat(found, dim)

    def full(self) -> Tensor:
        return self[tuple(slice(0, size) for size in self.shape)]

    @classmethod
    def __torch_function__(cls, *_: Any) -> Any:  # so that torch.cat and others hand it to `_Joining`
        return NotImplemented


class _Joining(TorchFunctionMode):
    """Makes torch.cat and torch.stack return `Joined`, and `contiguous` copy nothing, inside the block."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func in (torch.cat, torch.stack):
            tensors, dim = args[0], named.get("dim", args[1] if len(args) > 1 else 0)
            if func is torch.stack:
                tensors = [_full(tensor).unsqueeze(dim) for tensor in tensors]
            return Joined(tensors, dim)
        if func is torch.Tensor.contiguous:
            return args[0]
        return func(*tree_map(_full, args), **tree_map(_full, named))


def _full(value: Any) -> Any:
    return value.full() if isinstance(value, Joined) else value


@dataclass(frozen=True)
class _Conversion:
    """Tensors of a file, by their names `keys`, and a function that makes tensors of the model from them."""

    keys: list[str]
    convert: Callable[[Mapping[str, Tensor]], dict[str, Any]]


@dataclass
class Checkpoint:
    """Full tensors of a model by name, made from the mapped tensors of files when they are read.

    conversions: by name of the model's tensors
    stored: the names under which the file has tied tensors
    rules: of `transformers`, those that were used; None: the model has no rules
    made: by the last conversion
    """

    tensors: Mapping[str, Tensor]
    conversions: dict[str, _Conversion] = field(default_factory=dict)
    stored: dict[str, str] = field(default_factory=dict)
    rules: list[Any] | None = None
    made: tuple[_Conversion | None, dict[str, Any]] = (None, {})

    def __getitem__(self, name: str) -> Any:
        """Return the full tensor, which may be `Joined`; keep the other tensors of its conversion."""
        name = self.stored.get(name, name)
        conversion = self.conversions[name]
        if self.made[0] is not conversion:
            self.made = (None, {})  # freed before the next is made
            self.made = (conversion, conversion.convert(self.tensors))
        return self.made[1][name]

    def load_into(self, model: nn.Module, state: State, world: TensorWorld) -> None:
        """Give memory to a split model from the meta device, and copy this rank's shards."""
        model.to_empty(device=device_of(world))
        copy_shards(shards_of(model, state), self)  # type: ignore[arg-type]
        if self.rules is not None:
            vars(model)["_weight_conversions"] = self.rules  # `save_pretrained` undoes them
        self.made = (None, {})


def open_checkpoint(
    model: nn.Module, path: str | os.PathLike[str], *, compare: bool, world: TensorWorld
) -> Checkpoint:
    """Open a checkpoint; all ranks raise the same list of problems unless it fits the unsharded model.

    compare: whether all ranks compare their biases and weights of norms, because each reads files of its own
    """
    checkpoint, problem = None, None
    try:
        checkpoint = _opened(model, path)
    except Exception as error:
        problem = error
    raise_alike(problem, f"checkpoint {os.fspath(path)}", world)
    assert checkpoint is not None
    small = [tensor.to(device_of(world)) for tensor in checkpoint.tensors.values() if tensor.ndim < 2]
    if compare and world.size > 1 and small and bool(unlike_first_rank(small, world.group).any()):
        raise ValueError(
            f"checkpoint: {path}: expected the same files on all tensor-parallel ranks, got other numbers"
        )
    return checkpoint


def _opened(model: nn.Module, path: str | os.PathLike[str]) -> Checkpoint:
    """Return a checkpoint without reading numbers, except of tied tensors; raise with a list of problems."""
    if not any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(
            "checkpoint: expected a model built under torch.device('meta'), got one with numbers; build it "
            "so, or leave out checkpoint"
        )
    held = model.state_dict(keep_vars=True)
    expected = {name: tensor for name, tensor in held.items() if isinstance(tensor, Tensor)}
    checkpoint = Checkpoint(safetensors.read(path))
    empty = {name: torch.empty_like(each, device="meta") for name, each in checkpoint.tensors.items()}
    found: dict[str, Any] = {}
    surplus: dict[str, list[str]] = {}  # names for the model, and those in the file
    problems: list[str] = []
    conversions, rules = _conversions(model, list(empty), expected)
    for conversion in conversions:
        keys = some_names(conversion.keys)
        try:
            made = conversion.convert(empty)
        except Exception as error:
            problems.append(f"{keys}: not converted to the model's tensors: {type(error).__name__}: {error}")
            continue
        surplus |= dict.fromkeys(made.keys() - expected.keys(), conversion.keys)
        if twice := [name for name in made if name in found]:
            problems.append(f"{keys}: {some_names(twice)} are in other tensors, too")
        found |= made
        checkpoint.conversions |= dict.fromkeys(made, conversion)
    checkpoint.rules = rules and [rule for rule in rules if rule.was_used()]
    ignored = SimpleNamespace(missing_keys=set(), unexpected_keys=set(surplus))
    if callable(adjust := getattr(model, "_adjust_missing_and_unexpected_keys", None)):
        adjust(ignored)  # tensors that `transformers` saved once
    unknown = sorted({key for name in ignored.unexpected_keys for key in surplus[name]})
    names: dict[int, list[str]] = {}
    for name, tensor in expected.items():
        names.setdefault(id(tensor), []).append(name)
    missing = [first for first, *others in names.values() if found.keys().isdisjoint([first, *others])]
    for name in expected.keys() & found.keys():
        problems += _unlike(name, expected[name], found[name])
    for tied in names.values():
        inside = [name for name in tied if name in found]
        if len({found[name].shape for name in inside}) == 1 and not _equal(checkpoint, inside):
            problems.append(
                f"{some_names(inside)} are one parameter of the model, and differ in the checkpoint; build "
                "the model with tie_word_embeddings=False in its config"
            )
        checkpoint.stored |= dict.fromkeys(tied, inside[0]) if inside else {}
    problems = sorted(problems)
    for how, which in (("not in the model", unknown), ("missing", missing)):
        if which:
            problems.insert(0, f"{how}: {some_names(which, MOST)}")
    if problems:
        more = f"and {len(problems) - MOST} more" if len(problems) > MOST else ""
        first = f"checkpoint: {path} does not fit this {type(model).__name__}; the model is unchanged"
        raise ValueError(listed(first, *problems[:MOST], more))
    return checkpoint


def _unlike(name: str, expected: Tensor, found: Any) -> list[str]:
    """Return the problem with a shape or dtype; floating-point dtypes of two bytes or more are converted."""
    if tuple(found.shape) != tuple(expected.shape):
        return [f"'{name}': expected {tuple(expected.shape)}, got {tuple(found.shape)}"]
    convertible = all(each.is_floating_point and each.itemsize > 1 for each in (found.dtype, expected.dtype))
    if found.dtype != expected.dtype and not convertible:
        return [f"'{name}': expected {expected.dtype}, got {found.dtype}"]
    return []


def _equal(checkpoint: Checkpoint, names: list[str]) -> bool:
    """Whether the file's tensors for the names of one parameter are equal."""
    if len(names) < 2:
        return True
    first, *others = (_full(checkpoint[name]) for name in names)
    return all(torch.equal(first, other) for other in others)


def _conversions(
    model: nn.Module, keys: list[str], expected: Mapping[str, Tensor]
) -> tuple[list[_Conversion], list[Any] | None]:
    """Return how the model's tensors are made, and the rules of `transformers`, None for a plain model."""
    as_named = [_Conversion([key], partial(_one, key, key)) for key in keys]
    if not hasattr(model, "base_model_prefix"):
        return as_named, None
    try:
        loading = import_module("transformers.core_model_loading")
        rules = import_module("transformers.conversion_mapping").get_model_conversion_mapping(model)
    except ImportError:  # version 4 has no rules
        return as_named, None
    renamings = [rule for rule in rules if isinstance(rule, loading.WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, loading.WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    found: list[_Conversion] = []
    collected: dict[str, list[tuple[str, str]]] = {}
    for key in sorted(keys, key=loading.dot_natural_key):
        rename = partial(loading.rename_source_key, key, meta_state_dict=expected)
        name, pattern = rename(renamings, converters, base_model_prefix=model.base_model_prefix)
        if name not in expected and key in expected:
            name, pattern = rename([], [], base_model_prefix=model.base_model_prefix)
        if pattern is None:
            found.append(_Conversion([key], partial(_one, key, name)))
        else:
            collected.setdefault(name, []).append((pattern, key))
    # conversions read shapes of parameters, which are other ones once the model is split
    unsplit = SimpleNamespace(config=model.config, get_parameter=expected.__getitem__)
    for name, sources in collected.items():
        convert = partial(_converted, by_pattern[sources[0][0]], name, sources, unsplit)
        found.append(_Conversion([key for _, key in sources], convert))
    return found, rules


def _one(key: str, name: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return {name: tensors[key]}


def _converted(
    rule: Any, name: str, sources: Iterable[tuple[str, str]], model: Any, tensors: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Return the results of a converter of `transformers`, by full name."""
    rule = deepcopy(rule)
    for pattern, key in sources:
        rule.add_tensor(name, key, pattern, partial(tensors.__getitem__, key))
    with torch.no_grad(), _Joining():
        made = rule.convert(name, model=model, config=model.config)
    return {each: value[0] if isinstance(value, list) else value for each, value in made.items()}
