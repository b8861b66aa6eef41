"""What a kernel itself says of its arguments: `python -m tpkernels.gate.own.inspection`, see `children`."""

from __future__ import annotations

import inspect
from typing import Any

from tpkernels.gate.own.children import Answer, Item, serve
from tpkernels.gate.own.found import found
from tpkernels.gate.own.record import ConfigError


def inspected(item: Item) -> Answer:
    """item: "kernel" and "oracle" of a table"""
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
    serve(inspected)
