"""What a kernel itself says of its arguments, and which kernels a module registers; both are imported for it.

`python -m tpkernels.gate.user_kernels.inspection`, only in a process of `children`.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

from tpkernels.gate.user_kernels.children import Answer, ItemOfChild, said, serve
from tpkernels.gate.user_kernels.record import ConfigError
from tpkernels.gate.user_kernels.table import tables


def found(key: str, place: str) -> Any:
    """What "module:name" stands for, imported; ConfigError says why there is none."""
    name, attribute = place.split(":")
    try:
        module = import_module(name)
    except BaseException as error:  # SystemExit, too: it is about this module
        raise ConfigError(key, f"importing {name!r}: {said(error)}") from error
    if not hasattr(module, attribute):
        raise ConfigError(key, f"module {name!r} ({module.__file__}) has no {attribute!r}")
    return getattr(module, attribute)


def answered(item: ItemOfChild) -> Answer:
    """item: a "module", or "kernel" and "oracle" of a table"""
    return _registered(item["module"]) if "module" in item else _inspected(item)


def _registered(module: str) -> Answer:
    try:
        import_module(module)
    except BaseException as error:
        raise ConfigError("importing it", said(error)) from error
    return {"kernels": tables()}


def _inspected(item: ItemOfChild) -> Answer:
    from triton.runtime.jit import JITFunction

    from tpkernels.gate.ahead_of_time import undecorated

    kernel = undecorated(found("kernel", item["kernel"]))
    if not isinstance(kernel, JITFunction):
        raise ConfigError(
            "kernel", f"expected a function under triton.jit, {item['kernel']} is {_kind(kernel)}"
        )
    if item["oracle"]:
        oracle = found("oracle", item["oracle"])
        if not callable(oracle):
            raise ConfigError("oracle", f"expected a function, {item['oracle']} is {_kind(oracle)}")
        if kernel.is_gluon():
            raise ConfigError("oracle", "Triton's interpreter knows no Gluon: leave it out")
    return {
        "arguments": list(kernel.arg_names),
        "constexprs": [one.name for one in kernel.params if one.is_constexpr],
        "defaults": {
            one.name: one.default
            for one in kernel.params
            if one.has_default and isinstance(one.default, bool | int | float | str | None)
        },
        "plain": [one.name for one in kernel.params if one.do_not_specialize],
        "unaligned": [one.name for one in kernel.params if one.do_not_specialize_on_alignment],
    }


def _kind(thing: Any) -> str:
    return f"a {type(thing).__name__}" if not inspect.isclass(thing) else "a class"


if __name__ == "__main__":
    serve(answered)
