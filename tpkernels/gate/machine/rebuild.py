"""A kernel as a Python function: its own code, with other globals.

What it calls of Triton is replaced by what stands in for it here, and the kernels it calls are rebuilt, too.
Layouts and dtypes are values that the machine takes as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from inspect import isclass
from types import CodeType, FunctionType, ModuleType
from typing import Any

import triton.language as tl

from tpkernels.gate.machine import blackwell, hopper, language
from tpkernels.gate.machine.memory import Descriptor
from tpkernels.gate.machine.recorder import MARK
from tpkernels.gate.machine.values import Pointer, Scalar


class Module:
    """A module of Triton, or one that holds kernels, as rebuilt functions see it."""

    def __init__(self, module: ModuleType, rebuilt: dict[Any, Any]) -> None:
        self._module, self._rebuilt = module, rebuilt

    def __getattr__(self, name: str) -> Any:
        return stand_in(getattr(self._module, name), self._rebuilt)


def rebuild(kernel: Any, rebuilt: dict[Any, Any] | None = None) -> Callable[..., Any]:
    """The function of a kernel, to be called within `recorder.recording`."""
    rebuilt = {} if rebuilt is None else rebuilt
    fn: FunctionType = kernel.fn
    if fn not in rebuilt:
        scope: dict[str, Any] = {MARK: True, "__builtins__": __builtins__, "range": language.loop_range}
        defaults = tuple(_constant(default) for default in fn.__defaults__ or ())
        function = FunctionType(fn.__code__, scope, fn.__name__, defaults, fn.__closure__)
        function.__kwdefaults__ = {name: _constant(x) for name, x in (fn.__kwdefaults__ or {}).items()}
        rebuilt[fn] = function  # before its globals: it may call itself
        for name in names_in(fn.__code__):
            if name in fn.__globals__:
                scope[name] = stand_in(fn.__globals__[name], rebuilt)
    found: Callable[..., Any] = rebuilt[fn]
    return found


def names_in(code: CodeType) -> Iterator[str]:
    """Every name that a function may look up, and those of functions inside it."""
    yield from code.co_names
    for nested in code.co_consts:
        if isinstance(nested, CodeType):
            yield from names_in(nested)


def stand_in(value: Any, rebuilt: dict[Any, Any]) -> Any:
    """What a rebuilt function finds in place of a global."""
    if isinstance(value, ModuleType):
        return Module(value, rebuilt)
    if isinstance(value, tl.constexpr):
        return value.value
    source = getattr(value, "fn", value)  # of a kernel, whether compiled or interpreted
    module = getattr(source, "__module__", None) or ""
    if module.partition(".")[0] != "triton" or isinstance(value, tl.dtype):
        return rebuild(value, rebuilt) if source is not value else value
    room, name = module.rpartition(".")[2], source.__name__
    found = _FUNCTIONS.get(room, language.FUNCTIONS).get(name)
    if found is not None:
        return found
    if isclass(value) or room == "_layouts":
        return value
    return _missing(f"{module}.{name}")


_FUNCTIONS = hopper.FUNCTIONS | {"blackwell": blackwell.FUNCTIONS}


def _missing(name: str) -> Callable[..., Any]:
    def called(*arguments: Any, **options: Any) -> None:
        raise NotImplementedError(f"the machine has nothing that stands in for {name}")

    return called


def _constant(value: Any) -> Any:
    return value.value if isinstance(value, tl.constexpr) else value


def argument(value: Any) -> Any:
    """A launch's argument as the kernel sees it."""
    if isinstance(value, (tuple, list)):
        return tuple(argument(each) for each in value)
    if hasattr(value, "block_shape"):
        return Descriptor(value)
    if hasattr(value, "data_ptr"):
        return Pointer(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return Scalar(value)
    return _constant(value)
