"""Public names that are imported when they are first used, each said once: in the package's stub."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

_IMPORT = re.compile(r"^from (\S+) import \(?\s*(\w+) as \w+", re.MULTILINE)


def homes_in_stub(init: str) -> Mapping[str, str]:
    """Public names -> the module to import each from, as the stub beside an `__init__.py` says.

    Type checkers read the stub itself, and so see the same names.

    init: `__file__` of the package
    """
    stub = Path(init).with_name("__init__.pyi").read_text()
    return {name: module for module, name in _IMPORT.findall(stub)}
