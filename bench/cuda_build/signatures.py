"""Whether callables of torch take the arguments of calls, and operators have entries for a device type."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from bench.cuda_build.lookup import Found, Thing

# Keywords of tensor functions that their schemas lack: Python's side of torch knows them.
_ALIASES = {"input": "self", "axis": "dim", "keepdims": "keepdim"}
_OF_FACTORIES = {"requires_grad", "dtype", "device", "layout", "pin_memory"}
_ON_THE_CPU = {"aten::from_file"}  # which is asked for memory of the host
# Entries that serve every device type; a default that calls the form with `out` needs that one's own.
_FOR_ALL = "CompositeImplicitAutograd", "CompositeExplicitAutograd"


def compare_members(ours: type, theirs: type, found: Found) -> None:
    """A protocol of ours stands for a class of torch: methods and how many arguments they take."""
    for name, member in vars(ours).items():
        if name.startswith("_") or not (inspect.isfunction(member) or isinstance(member, property)):
            continue
        full = f"{theirs.__name__}.{name}"
        found.names.add(full)
        if not hasattr(theirs, name):
            found.problems.append(f"{ours.__qualname__}: {full} is not there")
        elif inspect.isfunction(member):
            count = len(inspect.signature(member).parameters) - 1
            found.calls += 1
            thing = Thing(full, getattr(theirs, name))
            compare(thing, f"{ours.__qualname__}", count, [], found, is_method=True)


def require(members: Sequence[str], theirs: type, found: Found) -> None:
    """Of a class of torch."""
    for name in members:
        full = f"{theirs.__name__}.{name}"
        found.names.add(full)
        if not hasattr(theirs, name):
            found.problems.append(f"{full} is not there")


@dataclass(frozen=True)
class Signature:
    """Of one overload."""

    names: frozenset[str]  # of arguments that may be given by name
    most: float  # positional arguments
    any_name: bool = False


def compare(
    callee: Thing,
    where: str,
    positional: int | None,
    keywords: Sequence[str],
    found: Found,
    is_method: bool = False,
) -> None:
    """positional: how many; None: some are unpacked"""
    if not is_method:
        _look_up_operator(callee, where, keywords, found)
    signatures = _signatures_of(callee.value)
    if not signatures:
        found.unreadable.add(callee.name)
        return
    found.calls += not is_method
    for each in signatures:
        fits = positional is None or positional <= each.most
        if fits and (each.any_name or each.names.issuperset(keywords)):
            return
    if unknown := [word for word in keywords if not any(s.any_name or word in s.names for s in signatures)]:
        found.problems.append(f"{where}: {callee.name} takes no {', '.join(unknown)}")
    elif positional is not None and all(positional > each.most for each in signatures):
        most = max(each.most for each in signatures)
        found.problems.append(f"{where}: {callee.name} takes {most:g} arguments, got {positional}")
    else:
        found.problems.append(f"{where}: no form of {callee.name} takes these arguments: {list(keywords)}")


def _signatures_of(value: Any) -> list[Signature]:
    """All that are known of a callable; none if nothing can be read."""
    if schemas := _schemas_of(value):
        from_schemas = [_of_schema(schema) for schema in schemas]
        documented = [_widened(each) for each in _of_documentation(value)]
        return [*from_schemas, *documented]
    if documented := _of_documentation(value):
        return documented
    if isinstance(value, type) and (documented := _of_documentation(vars(value).get("__init__"))):
        return documented  # a class of a binding
    try:
        return [_of_python(inspect.signature(value), is_method=_is_plain_method(value))]
    except (TypeError, ValueError):
        return []


def _is_plain_method(value: Any) -> bool:
    """A function that was taken from its class: its first argument is given by the call."""
    if not inspect.isfunction(value) or "." not in value.__qualname__:
        return False
    return next(iter(inspect.signature(value).parameters), "") == "self"


def _of_python(signature: inspect.Signature, *, is_method: bool) -> Signature:
    parameters = list(signature.parameters.values())[1 if is_method else 0 :]
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    kinds = [parameter.kind for parameter in parameters]
    most = float("inf") if inspect.Parameter.VAR_POSITIONAL in kinds else sum(k in positional for k in kinds)
    return Signature(
        frozenset(each.name for each in parameters if each.kind in by_name),
        most,
        inspect.Parameter.VAR_KEYWORD in kinds,
    )


def _schemas_of(value: Any) -> Sequence[Any]:
    """Of a function of torch that is an operator."""
    if isinstance(value, torch._ops.OpOverload):
        return [value._schema]
    if isinstance(value, torch._ops.OpOverloadPacket):
        return [getattr(value, name)._schema for name in value.overloads()]
    if not inspect.isbuiltin(value) and not inspect.ismethoddescriptor(value):
        return []
    home = getattr(value, "__objclass__", None) or getattr(value, "__module__", None)
    if home not in (torch._C.TensorBase, "torch", "torch._C._nn", "torch._C._linalg", "torch._C._fft"):
        return []
    return _schemas_named(value.__name__)


@cache
def _schemas_named(name: str) -> Sequence[Any]:
    found: Sequence[Any] = torch._C._jit_get_schemas_for_operator(f"aten::{name}")
    return found


def _of_schema(schema: Any) -> Signature:
    names = {argument.name for argument in schema.arguments}
    names |= {alias for alias, name in _ALIASES.items() if name in names}
    if "pin_memory" in names or "requires_grad" in names:
        names |= _OF_FACTORIES
    return Signature(frozenset(names), float("inf"))  # sizes may be given one by one


def _widened(signature: Signature) -> Signature:
    return Signature(signature.names, float("inf"), signature.any_name)


_LINE = re.compile(r"^(?:\d+\. )?(?P<name>[\w.]+)\((?P<arguments>.*)\)(?: -> .*)?$")


def _of_documentation(value: Any) -> list[Signature]:
    """Of a function of a binding, or of one that torch documents: each line that is a signature."""
    if inspect.isfunction(value) or inspect.ismethod(value) or isinstance(value, type):
        return []
    name, found = getattr(value, "__name__", ""), []
    for line in (value.__doc__ or "").splitlines():
        match = _LINE.match(line.strip())
        if (
            match is None
            or match["name"].rpartition(".")[2] != name
            or match["arguments"] == "*args, **kwargs"
        ):
            continue
        found.append(_of_line(match["arguments"]))
    return found


def _of_line(text: str) -> Signature:
    names, most, keyword_only, any_name = set(), 0.0, False, False
    for argument in _split(text):
        name = re.split(r"[:=]", argument)[0].strip()
        if argument.startswith("**"):
            any_name = True
        elif argument.startswith("*"):
            keyword_only = True
            most = most if argument == "*" else float("inf")
        elif name not in ("self", "/"):
            most += not keyword_only
            if not re.fullmatch(r"arg\d+", name):
                names.add(name)
    return Signature(frozenset(names), most, any_name)


def _split(text: str) -> list[str]:
    """At the commas outside of brackets."""
    found, depth = [""], 0
    for letter in text:
        depth += (letter in "([{<") - (letter in ")]}>" and not found[-1].endswith("-"))
        if letter == "," and not depth:
            found.append("")
        else:
            found[-1] += letter
    return [part.strip() for part in found if part.strip()]


def _look_up_operator(callee: Thing, where: str, keywords: Sequence[str], found: Found) -> None:
    """Some overload of an operator that takes these keywords must have an entry for the device type."""
    schemas = _schemas_of(callee.value)
    if not found.device_type or not schemas:
        return
    if (name := schemas[0].name) in _ON_THE_CPU:
        return
    found.operators.add(name)
    fitting = [schema for schema in schemas if _of_schema(schema).names.issuperset(keywords)]
    if fitting and not any(_has_entry(schema, found.device_type) for schema in fitting):
        found.problems.append(f"{where}: {name} has no entry for {found.device_type}")


def _has_entry(schema: Any, device_type: str) -> bool:
    overload = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
    return _is_registered(overload, device_type)


@cache
def _is_registered(overload: str, device_type: str) -> bool:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    try:
        return any(has_kernel(overload, key) for key in (device_type, *_FOR_ALL))
    except RuntimeError:  # an operator of TorchScript, which goes to no device
        return True
