"""Importing what a gate.toml names. Only in a process of `children`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from tpkernels.gate.own.children import said
from tpkernels.gate.own.record import ConfigError


def found(key: str, place: str) -> Any:
    """What "module:name" stands for; ConfigError says why there is none."""
    name, attribute = place.split(":")
    try:
        module = import_module(name)
    except BaseException as error:  # SystemExit, too: it is about this module
        raise ConfigError(key, f"importing {name!r}: {said(error)}") from error
    if not hasattr(module, attribute):
        raise ConfigError(key, f"module {name!r} ({module.__file__}) has no {attribute!r}")
    return getattr(module, attribute)
