"""Examples in docstrings give what they show."""

import doctest
import re
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for folder in ("tpkernels", "tests", "bench")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if re.search(r"^ *>>> ", path.read_text(), re.MULTILINE)
]


@pytest.mark.parametrize("module", MODULES)
def test_examples_give_what_they_show(module):
    results = doctest.testmod(import_module(module), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert results.attempted > 0
    assert results.failed == 0  # what differs is in the output above
