"""Makes a smaller model of the same class, which is compared with its split copy if the model is too large.

The class is called with a copy of the model's config, in which layers are fewer, features narrower, and
vocabulary and experts smaller. Numbers of heads stay, and ranks divide what they divided: the plan splits the
same modules in the same way. Layers are the first ones, as many as show every kind of layer.

A smaller model stands for the model only if it has the same modules by name and class: an adapter, a layer
that was replaced, a forward or a hook of its own is named as the reason against it. Each layer that it has
not is found in the first layer of its kind.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from tpkernels.interop.parallelize.hf_modules import oriented_shape
from tpkernels.interop.parallelize.plan import (
    Number,
    ParallelizePlan,
    PlanEntry,
    SharedHeads,
    Split,
    Tail,
    matches,
)

# Names in configs of `transformers`.
_WIDTH = re.compile(
    r"(.*_(dim|rank)|.*(hidden|intermediate|embedding|projection|output|head)_size"
    r"|dim|d_model|d_ff|d_kv|d_inner|n_embd|n_inner|lru_width)"
)
_LAYERS = re.compile(r"(num_.*layers|n_layers?|(en|de)coder_layers|depth)")
_OF_OTHERS = re.compile(r"(encoder|cross|vision|text|audio)_.*hidden_size")  # another config's features
_HIDDEN = ("hidden_size", "d_model", "n_embd", "dim")
_HEADS = re.compile(r"(num_(attention_)?heads|n_heads?|(en|de)coder_attention_heads)")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "num_experts_per_token")
_SPECIAL = re.compile(r".*token_(id|ids|index)")
_PLACE = re.compile(r".*(idx|index|layer_(id|number)).*")  # attributes with a layer's own number

_LEAST_WIDTH = 8  # rotary embeddings need even ones, also of a quarter of a head's features
_VOCABULARY = 512


@dataclass(frozen=True)
class Smaller:
    """A smaller model of the same class.

    first: by name of a list of modules in the large model, of each element the first one of its kind
    """

    model: nn.Module
    first: Mapping[str, tuple[int, ...]]

    def name_of(self, name: str) -> str:
        """Return the smaller model's name for a module or parameter of the large one."""
        path = name.split(".")
        found = list(path)
        for length, part in enumerate(path):
            if (numbers := self.first.get(".".join(path[:length]))) is not None:
                found[length] = str(numbers[int(part)])
        return ".".join(found)


def smaller_of(model: nn.Module, ranks: int, device: torch.device) -> Smaller:
    """Return a smaller model, the same on all ranks; raise ValueError with the reason if there is none."""
    config = getattr(model, "config", None)
    if config is None:
        raise ValueError("it has no config")
    _require_plain(model)
    small_config = deepcopy(config)
    _shrink(small_config, model, ranks)
    kind: Any = type(model)
    default = torch.get_default_dtype()
    try:
        with torch.random.fork_rng([]), torch.device("cpu"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            torch.set_default_dtype(torch.float32)
            small: nn.Module = kind(small_config)
    except Exception as error:
        raise ValueError(f"{kind.__name__}(config) raises {type(error).__name__}: {error}") from error
    finally:
        torch.set_default_dtype(default)
    _require_same_modules(model, small)
    lists = [(name, each) for name, each in model.named_modules() if isinstance(each, nn.ModuleList)]
    return Smaller(small.to(device), {name: _first_of_each_kind(each) for name, each in lists})


def smaller_plan(model: nn.Module, small: nn.Module, plan: ParallelizePlan) -> ParallelizePlan:
    """Return a model's plan for the smaller model; raise ValueError if an entry does not shrink with it."""
    named = dict(small.named_modules(remove_duplicate=False))
    found: dict[str, list[PlanEntry]] = {}
    for match in matches(model, plan):
        if match.name in named:
            entry = _smaller_entry(match.name, match.entry, match.module, named[match.name])
            found.setdefault(match.name, []).append(entry)
    return {name: entries[0] if len(entries) == 1 else tuple(entries) for name, entries in found.items()}


def _smaller_entry(name: str, entry: PlanEntry, module: nn.Module, small: nn.Module) -> PlanEntry:
    if isinstance(entry, Number):
        read = attrgetter(entry.attribute)
        return replace(entry, value=_divided(name, entry.value, read(module), read(small)))
    if isinstance(entry, Split | SharedHeads | Tail):
        side = 1 if isinstance(entry, Split) and entry.kind.startswith("row") else 0
        sizes = oriented_shape(module)[side], oriented_shape(small)[side]
        if isinstance(entry, Tail):
            return replace(entry, features=_divided(name, entry.features, *sizes))
        if isinstance(entry, Split) and isinstance(entry.stacked, tuple):
            entry = replace(entry, stacked=tuple(_divided(name, each, *sizes) for each in entry.stacked))
        if entry.unit > 1:
            entry = replace(entry, unit=_divided(name, entry.unit, *sizes))
    return entry


def _divided(name: str, number: int, size: int, small_size: int) -> int:
    """Return a number that shrinks as a size does."""
    found, rest = divmod(number * small_size, size)
    if rest:
        raise ValueError(
            f"'{name}' shrinks from {size} to {small_size}, and {number} does not shrink with it"
        )
    return found


def _configs(config: Any) -> Iterator[Any]:
    """Yield a config and the configs in it."""
    yield config
    for value in list(vars(config).values()):
        if hasattr(value, "model_type"):
            yield from _configs(value)


def _numbers(config: Any) -> Iterator[tuple[Any, str, int]]:
    """Yield each config, and the names and values of its numbers."""
    for each in _configs(config):
        for name, value in list(vars(each).items()):
            if type(value) is int:
                yield each, name, value


def _shrink(config: Any, model: nn.Module, ranks: int) -> None:
    """Make the numbers in a config smaller, in place."""
    configs = list(_configs(config))
    for each in configs:
        _shrink_layers(each, model)
        _shrink_experts(each)
    meet = any(_OF_OTHERS.fullmatch(name) for each in configs for name in vars(each))
    for together in [configs] if meet else [[each] for each in configs]:
        factor = min(_factor(each, ranks) for each in together)
        for each in together:
            _shrink_features(each, factor)
    sizes = [value for _, name, value in _numbers(config) if "vocab_size" in name and value > _VOCABULARY]
    if not sizes:
        return
    for each, name, value in _numbers(config):
        if "vocab_size" in name and value > _VOCABULARY:  # ranks pad it, or not, as before
            setattr(each, name, _VOCABULARY - _VOCABULARY % ranks + value % ranks)
    _shrink_special_ids(config, _VOCABULARY - _VOCABULARY % ranks)


def _shrink_special_ids(config: Any, size: int) -> None:
    """Give special tokens other ids, below `size` and distinct as before."""
    new: dict[int, int] = {}

    def smaller(value: Any) -> Any:
        if isinstance(value, list):
            return [smaller(each) for each in value]
        if type(value) is not int or value < size:
            return value
        return new.setdefault(value, size - 1 - len(new))

    for each in _configs(config):
        for name, value in list(vars(each).items()):
            if _SPECIAL.fullmatch(name):
                setattr(each, name, smaller(value))


def _widths(config: Any) -> dict[str, Any]:
    """Return a config's numbers of features, or lists of them."""
    return {name: value for name, value in vars(config).items() if _WIDTH.fullmatch(name)}


def _factor(config: Any, ranks: int) -> int:
    """Return the largest power of two by which all numbers of features may be divided."""
    numbers = _widths(config)
    widths: list[int] = []
    for value in numbers.values():
        widths += [each for each in (value if isinstance(value, list) else [value]) if type(each) is int]
    widths = [each for each in widths if each >= _LEAST_WIDTH]
    said = type(numbers.get("head_dim")) is int  # else a head's features may be no number of the config
    for name, heads in vars(config).items():
        if _HEADS.fullmatch(name) and type(heads) is int and heads and not said:
            hidden = [value for each in _HIDDEN if type(value := getattr(config, each, None)) is int]
            widths += [value // heads for value in hidden if value % heads == 0]
    if not widths:
        return 1
    factor = 1
    while all(_may_halve(width, 2 * factor, ranks) for width in widths):
        factor *= 2
    return factor


def _shrink_features(config: Any, factor: int) -> None:
    """Divide all numbers of features of one config."""
    for name, value in _widths(config).items():
        if isinstance(value, list):
            setattr(config, name, [each // factor if each >= _LEAST_WIDTH else each for each in value])
        elif type(value) is int and value >= _LEAST_WIDTH:
            setattr(config, name, value // factor)
    for said in (getattr(config, name, None) for name in ("rope_parameters", "rope_scaling")):
        if isinstance(said, dict) and isinstance(sections := said.get("mrope_section"), list):
            said["mrope_section"] = [each // factor for each in sections]  # of half a head's features


def _may_halve(width: int, factor: int, ranks: int) -> bool:
    small = width // factor
    alike = width % ranks > 0 or small % ranks == 0
    return width % factor == 0 and small >= _LEAST_WIDTH and small % 2 == 0 and alike


def _shrink_experts(config: Any) -> None:
    """Leave twice as many experts as a token takes, in as many groups as before."""
    groups = getattr(config, "n_group", None) or 1
    chosen = max((n for name in _CHOSEN if type(n := getattr(config, name, None)) is int), default=2)
    least = -(-max(2 * chosen, 2 * groups) // groups) * groups
    for name in _EXPERTS:
        if type(count := getattr(config, name, None)) is int and count > least:
            setattr(config, name, least)


def _shrink_layers(config: Any, model: nn.Module) -> None:
    """Leave the first layers, at least two, of all kinds; all if the last ones share keys with others."""
    stacks = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    if any(value for name, value in vars(config).items() if "shared_layers" in name):
        return
    for name, count in list(vars(config).items()):
        if not _LAYERS.fullmatch(name) or type(count) is not int:
            continue
        lists = {
            each: value
            for each, value in vars(config).items()
            if isinstance(value, list | tuple) and len(value) == count
        }
        kinds = [
            value for value in lists.values() if len(set(map(str, value))) < count
        ]  # not layers' numbers
        alike = [stack for stack in stacks if len(stack) == count]
        if not alike:
            continue
        least = max(2, *(1 + max(_first_of_each_kind(stack, kinds)) for stack in alike))
        setattr(config, name, min(least, count))
        for each, value in lists.items():
            setattr(config, each, value[:least])


def _first_of_each_kind(stack: nn.ModuleList, lists: Sequence[Any] = ()) -> tuple[int, ...]:
    """Return of each layer the number of the first one of its kind.

    lists: further values of each layer
    """
    kinds: dict[Any, int] = {}
    described = ((*(str(each[n]) for each in lists), *_description(layer)) for n, layer in enumerate(stack))
    return tuple(kinds.setdefault(one, number) for number, one in enumerate(described))


def _description(layer: nn.Module) -> Iterator[Any]:
    """Yield what two layers of a kind have in common."""
    for name, module in layer.named_modules():
        plain = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, bool | int | float | str) and not _PLACE.fullmatch(key)
        }
        shapes = [(short, p.shape) for short, p in module._parameters.items() if p is not None]
        yield name, type(module), str(sorted(plain.items())), str(shapes)


def _require_plain(model: nn.Module) -> None:
    """Raise if a module computes in a way that its class does not."""
    for name, module in model.named_modules():
        own = vars(module)
        if "forward" in own or own["_forward_hooks"] or own["_forward_pre_hooks"]:
            raise ValueError(f"'{name}' has a forward or hooks of its own")


def _require_same_modules(model: nn.Module, small: nn.Module) -> None:
    """Raise unless the smaller model has the model's modules, but for the last ones of lists."""
    stacks = {name: module for name, module in small.named_modules() if isinstance(module, nn.ModuleList)}
    expected = {name: type(module) for name, module in model.named_modules() if not _left_out(name, stacks)}
    found = {name: type(module) for name, module in small.named_modules()}
    for name in [*expected, *found]:
        if expected.get(name) is not found.get(name):
            kinds = " or ".join(kind.__name__ for kind in (expected.get(name), found.get(name)) if kind)
            raise ValueError(f"'{name}' ({kinds}) is in one of both only, or of another class")
    count = sum(p.numel() for p in small.parameters())
    if count > sum(p.numel() for p in model.parameters()) // 2:
        raise ValueError(f"it would have {count} numbers, too")


def _left_out(name: str, stacks: dict[str, nn.ModuleList]) -> bool:
    """Whether a module is, or is in, a list's element that the smaller model has not."""
    path = name.split(".")
    for length, part in enumerate(path):
        stack = stacks.get(".".join(path[:length]))
        if stack is not None and part.isdigit() and int(part) >= len(stack):
            return True
    return False
