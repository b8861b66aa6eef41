"""Which kernels a module registers: `python -m tpkernels.gate.user_kernels.registered`, see `children`."""

from __future__ import annotations

from importlib import import_module

from tpkernels.gate.user_kernels.children import Answer, Item, said, serve
from tpkernels.gate.user_kernels.record import ConfigError
from tpkernels.gate.user_kernels.register import tables


def registered(item: Item) -> Answer:
    """item: "module" """
    try:
        import_module(item["module"])
    except BaseException as error:
        raise ConfigError("importing it", said(error)) from error
    return {"kernels": tables()}


if __name__ == "__main__":
    serve(registered)
