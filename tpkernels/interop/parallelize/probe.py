"""Finds replicated parameters with partial gradients by one forward without communication.

The gradient of a parameter between a column and a row layer, such as a norm of queries or keys, is partial:
each rank sees its own features only. To find such parameters, a copy of the unsharded model is called: its
column layers return this rank's features, its row layers get zeros for the features of other ranks. In
autograd's graph a gradient is partial if a path leads from a row layer to the parameter without a column
layer on it. Without such a graph, the positions of modules decide.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import Node

from tpkernels.interop.parallelize.changes import Changes
from tpkernels.interop.parallelize.hf_modules import ModuleChange
from tpkernels.interop.parallelize.plan import listed
from tpkernels.interop.parallelize.twins import Inputs, call_model, floating_tensors, trial_context

ParameterNames = frozenset[str]


def partial_parameters(model: nn.Module, changes: Changes, seen: dict[str, bool]) -> ParameterNames:
    """Return names of parameters with partial gradients; raise if it is unknown for a parameter.

    seen: from `graph_of_rank`: by name, whether a parameter sees this rank's features only
    """
    replaced = changes.handled
    said = {id(p): partial for module, partial in changes.kept.items() for p in module.parameters()}
    beside = {id(p) for module in _beside_split(model, changes.modules) for p in module._parameters.values()}
    names = []
    for name, parameter in model.named_parameters():
        key = id(parameter)
        if key in replaced or not parameter.is_floating_point():
            continue
        if key not in said and name not in seen and key in beside:
            raise ValueError(
                listed(
                    f"'{name}' is next to split layers, and no call shows whether its gradient is full or "
                    "partial",
                    "pass verify=example inputs that use it, or",
                    "give the plan an entry for its module: 'replicated', if it works on full features, or "
                    "'partial', if on this rank's, or",
                    "turn reentrant checkpointing on afterwards: in eval mode it hides the use",
                )
            )
        if said.get(key, seen.get(name, False)):
            names.append(name)
    return frozenset(names)


def graph_of_rank(twin: nn.Module, changes: Changes, inputs: Inputs) -> dict[str, bool]:
    """Return for each parameter that the twin uses whether it sees this rank's features only.

    changes: of the twin; this call divides its numbers
    """
    entering: set[Node] = set()  # walking backward: inputs of row layers, where features become split
    leaving: set[Node] = set()  # and outputs of column layers, where they are full again
    roots: list[Tensor] = []
    running: list[str] = []
    names = {id(p): name for name, p in twin.named_parameters()}
    replaced = changes.handled
    changes.set_numbers()
    for name, module in twin.named_modules():
        module.register_forward_pre_hook(lambda _, __, name=name: running.append(name))
    for change in changes.modules:
        if change.narrows_output:
            change.old.register_forward_hook(_returns_shard(change, leaving))
        elif change.kind == "row":
            change.old.register_forward_pre_hook(_pads_input(change, entering))
            change.old.register_forward_hook(lambda _, __, output: roots.append(output))
        elif change.kind == "parameters" and not change.summed:
            for short in change.cuts:
                whole = getattr(change.old, short).detach()
                setattr(change.old, short, nn.Parameter(change.shard_of(short, whole)))
    for module, _ in changes.tails:
        module.register_forward_hook(partial(_leaves, leaving))
    for module in twin.modules():
        module.register_forward_hook(lambda *_: running.__delitem__(-1))
    try:
        with trial_context(twin):
            output = floating_tensors(call_model(twin, inputs))[:1]
    except Exception as error:
        place = (running or [""])[-1] or type(twin).__name__
        raise ValueError(
            listed(
                f"plan: '{place}' does not take this rank's features, though it takes all of them",
                f"it raises {type(error).__name__}: {error}",
                "if it reads their number from an attribute, give the plan a Divided; otherwise split it, or "
                "the layers before it, in another way",
            )
        ) from error
    found = _walk([*output, *roots], entering, leaving)
    said = {id(p) for module in changes.kept for p in module.parameters()}
    both = [names[p] for p, where in found.items() if len(where) == 2 and p in names and p not in said]
    if both:
        more = f"; so do {len(both) - 1} more parameters" if len(both) > 1 else ""
        raise ValueError(
            listed(
                f"plan: '{both[0]}' reaches full features, and split features without a column before them"
                + more,
                "their gradients would be neither full nor partial",
                "let its results enter through a column, or split less",
            )
        )
    return {names[p]: True in where for p, where in found.items() if p in names and p not in replaced}


def _returns_shard(change: ModuleChange, leaving: set[Node]) -> Any:
    def hook(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        shard = change.own_output(output)
        if shard.grad_fn is not None:  # under no_grad, as in reentrant checkpointing, there is no graph
            leaving.add(shard.grad_fn)
        return shard

    return hook


def _leaves(leaving: set[Node], _: nn.Module, __: Any, output: Tensor) -> Tensor:
    """Treat the full output as leaving split features: features before the tail enter a column."""
    output = output.clone()
    if output.grad_fn is not None:
        leaving.add(output.grad_fn)
    return output


def _pads_input(change: ModuleChange, entering: set[Node]) -> Any:
    assert change.features is not None
    features, full = change.features.size, change.features.full

    def hook(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x = args[0]
        if x.shape[-1] != features:
            raise ValueError(f"expected this rank's {features} of {full} features, got {tuple(x.shape)}")
        padded = F.pad(x, (0, full - features))
        if padded.grad_fn is not None:
            entering.add(padded.grad_fn)
        return (padded, *args[1:])

    return hook


def _walk(roots: Iterable[Tensor], entering: set[Node], leaving: set[Node]) -> dict[int, set[bool]]:
    """Return for each parameter, by id, whether split features (True), full ones (False) or both reach it."""
    todo = deque((x.grad_fn, False) for x in roots)
    visited: set[tuple[Node, bool]] = set()
    found: dict[int, set[bool]] = {}
    while todo:
        node, split = todo.popleft()
        if node is None or (node, split) in visited:
            continue
        visited.add((node, split))
        split = node in entering or (split and node not in leaving)
        if isinstance(variable := getattr(node, "variable", None), Tensor):
            found.setdefault(id(variable), set()).add(split)
        todo.extend((parent, split) for parent, _ in node.next_functions)
    return found


def _beside_split(model: nn.Module, changes: list[ModuleChange]) -> set[nn.Module]:
    """Return parents with a split layer among their children, and their children's modules without one."""
    split = {change.old for change in changes if change.narrows_output or change.kind == "row"}

    def children(module: nn.Module) -> Iterable[nn.Module]:
        for child in module.children():
            if isinstance(child, nn.ModuleList | nn.ModuleDict | nn.Sequential):
                yield from children(child)
            yield child

    found = set()
    for parent in model.modules():
        if split.isdisjoint(children(parent)) or parent in split:
            continue
        found.add(parent)
        for child in children(parent):
            if split.isdisjoint(child.modules()):
                found.update(child.modules())
    return found
