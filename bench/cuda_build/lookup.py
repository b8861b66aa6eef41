"""What names and expressions stand for in the torch that is installed, as far as it says so itself."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Thing:
    """What an expression stands for: an object of torch, or some instance of a class."""

    name: str
    value: Any  # the object, or the class
    is_instance: bool = False


@dataclass
class Found:
    """What was looked up, and what is wrong with it."""

    device_type: str = ""  # whose entries operators must have; empty: none is asked for
    names: set[str] = field(default_factory=set)
    calls: int = 0  # whose arguments were compared
    unreadable: set[str] = field(default_factory=set)  # callees without a signature
    operators: set[str] = field(default_factory=set)  # whose entries were looked up
    problems: list[str] = field(default_factory=list)
    absent: set[str] = field(default_factory=set)  # what code asks for before it takes it


def is_torchs(name: str) -> bool:
    return name.partition(".")[0] == "torch"


def thing_of(name: str, value: Any) -> Thing | None:
    """Of a value in torch: an object to be called or looked into, else an instance of its class."""
    if isinstance(value, ModuleType | type) or callable(value):
        return Thing(name, value)
    kind = type(value)
    return Thing(name, kind, is_instance=True) if is_torchs(kind.__module__) else None


def with_subclasses(kind: type) -> Iterator[type]:
    """What an instance may be: a backend is said to be one, and is NCCL's; a tensor may be a DTensor."""
    yield kind
    if kind is torch.Tensor:
        yield DTensor
    elif _is_of_a_binding(kind):
        subclasses: list[type] = kind.__subclasses__()
        for each in subclasses:
            yield from with_subclasses(each)


def _is_of_a_binding(kind: type) -> bool:
    """By pybind, or in C: all that its instances have stands in the class."""
    return any(base.__name__ == "pybind11_object" for base in kind.__mro__) or not kind.__flags__ & 1 << 9


@cache
def is_set_in_python(kind: type, name: str) -> bool:
    """Whether instances of a class in Python may have it, though the class has not."""
    if kind is torch.Tensor or _is_of_a_binding(kind):
        return False
    if hasattr(kind, "__getattr__"):
        return True
    pattern = re.compile(rf"\bself\.{name}\b|^    {name}:", re.MULTILINE)
    for base in kind.__mro__[:-1]:
        try:
            if pattern.search(inspect.getsource(base)):
                return True
        except (OSError, TypeError):
            continue  # a base in C
    return False


def member(name: str, kind: type, attribute: str, value: Any) -> Thing | None:
    if isinstance(value, property):
        return _named_class(name, _returned(getattr(value.fget, "__doc__", None) or ""), value.fget)
    if isinstance(value, staticmethod | classmethod) or callable(value):
        return Thing(name, getattr(kind, attribute))
    return None


def result(callee: Thing) -> Thing | None:
    """An instance of the class that a function returns, as far as it says so."""
    value = callee.value
    if isinstance(value, type):
        return Thing(callee.name, value, is_instance=True) if is_torchs(value.__module__) else None
    annotation = getattr(value, "__annotations__", {}).get("return")
    if isinstance(annotation, type):
        return Thing(annotation.__name__, annotation, True) if is_torchs(annotation.__module__) else None
    said = annotation if isinstance(annotation, str) else _returned(value.__doc__ or "")
    return _named_class(callee.name, said, value)


def _returned(doc: str) -> str:
    """The class of the first line of documentation, which is the signature."""
    arrow = re.search(r"\) -> ([\w.:]+)", doc)
    return arrow[1] if arrow else ""


def _named_class(name: str, said: str, near: Any) -> Thing | None:
    said = said.replace("c10d::", "torch._C._distributed_c10d.").strip()
    if said in ("Tensor", "torch.Tensor"):
        return Thing("torch.Tensor", torch.Tensor, is_instance=True)
    found: Any = getattr(near, "__globals__", {}).get(said.partition(".")[0])
    parts = said.split(".")
    if found is None and parts[0] == "torch":
        found = torch
    for part in parts[1:]:
        found = getattr(found, part, None)
    if isinstance(found, type) and is_torchs(found.__module__):
        return Thing(said, found, is_instance=True)
    return None
