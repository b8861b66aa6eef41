"""Finds the modules that compute on sharded tokens under sequence parallelism, by one call of a copy.

The layers are the modules of the nn.ModuleList with the plan's columns and rows. In a layer, a child with
split layers, such as attention or an MLP, gets all tokens; so does a child that holds other modules, such as
an attention that is not split. All other children, such as norms, must work on each token by itself, and get
this rank's tokens; so do columns and rows that are children themselves.

A child is plain if it has only columns, one row and modules on this rank's features, if its columns take the
child's input, and if it returns its row's output. Its all-reduces become transfers of tokens: see `tokens`.
Other children, such as a mixture of experts, compute as without sequence parallelism.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tpkernels.groups.random import draws
from tpkernels.interop.parallelize.changes import Changes
from tpkernels.interop.parallelize.guards import refuse_hidden_states
from tpkernels.interop.parallelize.hf_modules import ColumnLinear, ModuleChange, RowLinear
from tpkernels.interop.parallelize.probe import ParameterNames
from tpkernels.interop.parallelize.tokens import (
    TokenMove,
    Tokens,
    compute_columns,
    first_argument,
    move_input,
    move_output,
    sum_gradients,
)
from tpkernels.interop.parallelize.twins import Inputs, call_model, trial_context
from tpkernels.layers.world import TensorWorld


@dataclass(frozen=True)
class Sharing:
    """Names of the modules and parameters that compute on sharded tokens.

    layers: in the order of their calls
    columns: by module, column layers that take the module's input
    rows: row layers that return this rank's tokens
    whole: modules with all tokens: their input is gathered, and their output scattered
    partial: parameters that see this rank's tokens only
    """

    layers: tuple[str, ...]
    columns: tuple[tuple[str, tuple[str, ...]], ...]
    rows: tuple[str, ...]
    whole: tuple[str, ...]
    partial: tuple[str, ...]

    def extended(self, model: nn.Module, name_of: Callable[[str], str]) -> Sharing:
        """Return the same of a model with more layers. name_of: a layer's name here"""
        stack = self.layers[0].rpartition(".")[0]
        layers = [f"{stack}.{number}" for number, _ in enumerate(model.get_submodule(stack).children())]
        pairs = [(name_of(layer), layer) for layer in layers]

        def in_all(names: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(
                layer + name.removeprefix(first)
                for first, layer in pairs
                for name in names
                if name.startswith(f"{first}.")
            )

        columns = [
            (layer + name.removeprefix(first), tuple(layer + each.removeprefix(first) for each in taken))
            for first, layer in pairs
            for name, taken in self.columns
            if name.startswith(f"{first}.")
        ]
        return Sharing(
            tuple(layers), tuple(columns), in_all(self.rows), in_all(self.whole), in_all(self.partial)
        )


def share_tokens(model: nn.Module, sharing: Sharing, world: TensorWorld) -> None:
    """Shard the tokens of a split model's layers, as found on a copy."""
    tokens = Tokens(world)
    named = dict(model.named_modules(remove_duplicate=False))
    first, last = named[sharing.layers[0]], named[sharing.layers[-1]]
    moves: list[tuple[str, TokenMove]] = [(sharing.layers[0], tokens.begin)]
    moves += [(name, tokens.all) for name in sharing.whole]
    for name, columns in sharing.columns:
        layers = [named[column] for column in columns]
        moves.append((name, partial(compute_columns, tokens, layers)))
        for layer in layers:
            assert isinstance(layer, ColumnLinear)
            layer.tokens = tokens
    for name, move in moves:
        move_input(named[name], move)
    for name in sharing.whole:
        move_output(named[name], tokens.own)
    move_output(last, tokens.all)
    for name in sharing.rows:
        row = named[name]
        assert isinstance(row, RowLinear)
        row.tokens = tokens
    sum_gradients(model, sharing.partial, world, tokens)
    for module in model.modules():
        if module is not first and any(child is first for child in module.modules()):
            module.register_forward_pre_hook(refuse_hidden_states, with_kwargs=True)


def sharing_of(
    twin: nn.Module, changes: Changes, inputs: Inputs, by_features: ParameterNames, ranks: int
) -> Sharing:
    """Find modules with sharded tokens by one call of the twin; raise if one cannot. No communication.

    changes: of the twin
    by_features: parameters between columns and rows, which see this rank's features
    """
    layers = _layers(twin, changes)
    children = [child for layer in layers for child in twin.get_submodule(layer).children()]
    shared = {child for child, count in Counter(children).items() if count > 1}
    entries: dict[str, _LayerChild] = {}
    for layer in layers:
        entries |= _children_of(layer, changes)
        entries |= _unsplit_holders(twin, layer, entries, shared)
    seen = _RecordedCall(ranks, layers, entries)
    seen.watch(twin)
    with trial_context(twin), torch.no_grad(), _NoDrawsForShardedTokens(seen):
        try:
            call_model(twin.train(), inputs)
        except _Refused as error:
            raise ValueError(str(error)) from None
        except Exception as error:
            raise ValueError(
                "sequence_parallel: expected a model that runs in train mode with the inputs of verify, got "
                f"{type(error).__name__}: {error}"
            ) from error
    seen.require_calls()
    names = {id(p): name for name, p in twin.named_parameters()}
    by_tokens: set[str] = set()
    for layer in layers:
        by_tokens |= _sharded_parameters(twin, layer, entries, names) - by_features
    columns: list[tuple[str, tuple[str, ...]]] = []
    rows: list[str] = []
    whole: list[str] = []
    for name, entry in entries.items():
        if entry.direct or (entry.plain and _has_sums_only(twin, name, entry, names, by_features)):
            taken = tuple(change.name for change in entry.changes if change.kind == "column")
            columns += [(name, taken)] if taken else []
            rows += [change.name for change in entry.changes if change.kind == "row"]
        else:
            whole.append(name)
    return Sharing(tuple(layers), tuple(columns), tuple(rows), tuple(whole), tuple(sorted(by_tokens)))


@dataclass
class _LayerChild:
    """A child of a layer that gets all tokens.

    direct: the child is a split layer itself
    plain: as far as known, its columns take its input, and it returns its row's output
    """

    changes: list[ModuleChange]
    direct: bool
    plain: bool = True
    called: bool = False


def _layers(model: nn.Module, changes: Changes) -> list[str]:
    """Return names of the layers in the outermost nn.ModuleList with columns and rows."""
    modules = dict(model.named_modules(remove_duplicate=False))
    found: dict[str, str] = {}
    for change in changes.modules:
        if change.kind in ("head", "embedding", "table"):
            continue
        path = change.name.split(".")
        above = (".".join(path[:length]) for length in range(1, len(path)))
        stack = next((name for name in above if isinstance(modules[name], nn.ModuleList)), None)
        if stack is None:
            raise ValueError(
                f"sequence_parallel: expected all columns and rows in layers of an nn.ModuleList, got "
                f"'{change.name}'"
            )
        found.setdefault(stack, change.name)
    if len(found) != 1:
        raise ValueError(
            "sequence_parallel: expected columns and rows in one nn.ModuleList of layers, got "
            f"{', '.join(repr(name) for name in found.values()) or 'none'}"
        )
    (stack,) = found
    layers = modules[stack]._modules.values()  # `children` leaves out repeated modules
    if len(set(layers)) != len(layers):
        raise ValueError(f"sequence_parallel: expected distinct layers in '{stack}', got one twice")
    return [f"{stack}.{number}" for number in range(len(layers))]


def _children_of(layer: str, changes: Changes) -> dict[str, _LayerChild]:
    found: dict[str, _LayerChild] = {}
    for change in changes.modules:
        if not change.name.startswith(f"{layer}."):
            continue
        child = change.name.removeprefix(f"{layer}.").partition(".")[0]
        name = f"{layer}.{child}"
        found.setdefault(name, _LayerChild([], change.name == name)).changes.append(change)
    for name, entry in found.items():
        kinds = ["table" if isinstance(change.old, nn.Embedding) else change.kind for change in entry.changes]
        if entry.direct and kinds[0] not in ("column", "row"):
            raise ValueError(f"sequence_parallel: '{name}' cannot share tokens: it is a {kinds[0]}")
        entry.plain = "column" in kinds and kinds.count("row") == 1 and set(kinds) == {"column", "row"}
    return found


def _unsplit_holders(
    model: nn.Module, layer: str, entries: Container[str], shared: Container[nn.Module]
) -> dict[str, _LayerChild]:
    """Return a layer's other children that hold modules with parameters, such as an attention.

    shared: modules in several layers
    """
    found: dict[str, _LayerChild] = {}
    for child, module in model.get_submodule(layer).named_children():
        inner = (part for part in module.modules() if part is not module)
        name = f"{layer}.{child}"
        if name not in entries and module not in shared and any(part._parameters for part in inner):
            found[name] = _LayerChild([], direct=False, plain=False)
    return found


def _sharded_parameters(
    model: nn.Module, layer: str, entries: dict[str, _LayerChild], names: dict[int, str]
) -> set[str]:
    """Return parameters of children that get this rank's tokens; raise for one that may need all tokens."""
    found = set()
    for child, module in [("", model.get_submodule(layer)), *model.get_submodule(layer).named_children()]:
        name = f"{layer}.{child}".rstrip(".")
        if name in entries:
            continue
        for part in module.modules() if child else [module]:
            for parameter in part._parameters.values():
                if parameter is None:
                    continue
                if not child or (parameter.ndim > 1 and type(part) is not nn.Linear):
                    raise ValueError(
                        f"sequence_parallel: '{names[id(parameter)]}' is in a layer, but not next to columns "
                        "and rows, and it is not known whether its module needs all tokens; split it, too, "
                        "or parallelize the model without sequence_parallel"
                    )
                found.add(names[id(parameter)])
    return found


def _has_sums_only(
    model: nn.Module, name: str, entry: _LayerChild, names: dict[int, str], by_features: ParameterNames
) -> bool:
    split = {id(p) for change in entry.changes for p in change.old.parameters()}
    return all(id(p) in split or names[id(p)] in by_features for p in model.get_submodule(name).parameters())


class _Refused(Exception):
    pass


@dataclass
class _RecordedCall:
    """Records one call of the unsharded model."""

    ranks: int
    layers: list[str]
    entries: dict[str, _LayerChild]
    tokens: int = 0
    order: list[str] = field(default_factory=list)
    running: list[str] = field(default_factory=list)
    hidden: Tensor | None = None  # the current entry's input
    rows: list[Tensor] = field(default_factory=list)  # outputs of row layers in it

    def __post_init__(self) -> None:
        changes = [change for entry in self.entries.values() for change in entry.changes]
        self.kinds = {change.old: change.kind for change in changes}  # of split layers

    def watch(self, model: nn.Module) -> None:
        """Watch the calls of all modules of a model, which is not used afterwards."""
        for name, module in model.named_modules():
            before, after = partial(self.before, name), partial(self.after, name)
            module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
            module.register_forward_hook(after)

    def before(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record a module's input, as a pre-hook."""
        self.running.append(name)
        if name in self.layers:
            self.order.append(name)
            x = self.first(name, module, args, kwargs)
            self.tokens = self.tokens or x.shape[-2]
            if self.tokens % self.ranks:
                raise _Refused(
                    f"verify: expected inputs with a number of tokens that {self.ranks} ranks divide, for "
                    f"sequence_parallel, got {self.tokens} in '{name}'"
                )
            self.require_all_tokens(name, x)
        entry = self.entries.get(name)
        if entry is not None:
            self.hidden, entry.called = self.first(name, module, args, kwargs), True
            self.rows.clear()
            if not entry.direct:
                self.require_all_tokens(name, self.hidden)
        if self.kinds.get(module) == "column":
            current = self.current_entry()
            if current is not None and (args[0] if args else None) is not self.hidden:
                self.entries[current].plain = False

    def after(self, name: str, module: nn.Module, _: Any, output: Any) -> None:
        """Record a module's output, as a hook."""
        self.running.pop()
        if self.kinds.get(module) == "row":
            self.rows.append(output)
        entry = self.entries.get(name)
        if entry is not None and not entry.direct:
            returned = output[0] if isinstance(output, tuple) else output
            if not isinstance(returned, Tensor):
                raise _Refused(f"sequence_parallel: expected a tensor from '{name}', got {type(returned)}")
            self.require_all_tokens(name, returned)
            entry.plain = entry.plain and any(returned is row for row in self.rows)
        if name == self.layers[-1] and not isinstance(output, Tensor | tuple):
            raise _Refused(f"sequence_parallel: expected a tensor from '{name}', got {type(output)}")

    def current_entry(self) -> str | None:
        """Return the name of the running child; None outside."""
        return next((name for name in self.running if name in self.entries), None)

    def first(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Return the hidden states that a module is called with; refuse it if there are none."""
        x = args[0] if args else kwargs.get(first_argument(module))
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.ndim < 2:
            raise _Refused(
                f"sequence_parallel: expected '{name}' to be called with hidden states first, got {type(x)}"
            )
        return x

    def require_all_tokens(self, name: str, x: Tensor) -> None:
        """Refuse hidden states with another number of tokens."""
        if x.shape[-2] != self.tokens:
            raise _Refused(
                f"sequence_parallel: expected {self.tokens} tokens in dimension -2 of the hidden states of "
                f"'{name}', got {tuple(x.shape)}"
            )

    def require_calls(self) -> None:
        """Raise unless each layer was called once, in order, and each child was."""
        if self.order != self.layers:
            raise ValueError(
                f"sequence_parallel: expected one call of each of the layers '{self.layers[0]}' to "
                f"'{self.layers[-1]}', in this order, got {len(self.order)} calls"
            )
        missing = [name for name, entry in self.entries.items() if not entry.called]
        if missing:
            raise ValueError(f"sequence_parallel: expected calls of '{missing[0]}', got none")


class _NoDrawsForShardedTokens(TorchDispatchMode):
    """Refuses random numbers for sharded tokens: ranks would draw the same numbers for different tokens."""

    def __init__(self, seen: _RecordedCall) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = seen

    def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        running = self.seen.running
        inside = any(name in self.seen.layers for name in running)
        if inside and not self.seen.current_entry() and draws(function, args, kwargs or {}):
            raise _Refused(
                f"sequence_parallel: '{running[-1]}' draws random numbers for hidden states between columns "
                "and rows, such as a dropout; set its probability to 0, or parallelize the model without "
                "sequence_parallel"
            )
        return function(*args, **(kwargs or {}))
