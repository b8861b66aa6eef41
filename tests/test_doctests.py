"""Examples in docstrings give what they show."""

import doctest
import re
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[1]


def modules_with_examples():
    for folder in ("tpkernels", "tests", "bench"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if re.search(r"^ *>>> ", path.read_text(), re.MULTILINE):
                yield ".".join(path.relative_to(ROOT).with_suffix("").parts)


def test_examples_give_what_they_show():
    for module in modules_with_examples():
        results = doctest.testmod(import_module(module), optionflags=doctest.NORMALIZE_WHITESPACE)
        assert results.attempted > 0, module
        assert results.failed == 0, module  # what differs is in the output above
