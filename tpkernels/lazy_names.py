"""Imports public names at their first use; the package's stub lists each name once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

_IMPORT = re.compile(r"^from (\S+) import \(?\s*(\w+) as \w+", re.MULTILINE)


def homes_in_stub(init: str) -> Mapping[str, str]:
    """Return the module of each public name, from the stub next to an `__init__.py`.

    Type checkers read the stub itself, and so see the same names.

    init: `__file__` of the package
    """
    stub = Path(init).with_name("__init__.pyi").read_text()
    return {name: module for module, name in _IMPORT.findall(stub)}
