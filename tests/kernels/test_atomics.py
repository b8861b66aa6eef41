"""No sum may depend on which program of a kernel comes first."""

import ast
from pathlib import Path

import pytest

import tpkernels.kernels

KERNELS = Path(tpkernels.kernels.__file__).parent
ATOMICS = {  # of each file, and why no order of theirs changes a value
    "scatter_linear.py": {"atomic_add", "atomic_xchg"},  # counts the tiles of a chunk, raises its flag
    "waits.py": {"atomic_add", "atomic_cas"},  # looks at flags (adds 0), says which wait ran out
    "wgrad.py": {"atomic_add"},  # the copy engine's reduce-add: each element has one writer
}


def atomics_in(source: str) -> set[str]:
    return {
        node.func.attr
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if "atomic" in node.func.attr or "reduce_add" in node.func.attr
    }


def test_kernels_use_these_atomics_and_no_others():
    found = {str(path.relative_to(KERNELS)): atomics_in(path.read_text()) for path in KERNELS.rglob("*.py")}
    assert {file: names for file, names in found.items() if names} == ATOMICS


@pytest.mark.parametrize("name", ["atomic_add", "store_reduce_add"])
def test_another_one_is_seen(name):
    assert atomics_in(f"def kernel(p, x):\n    tl.{name}(p, x)") == {name}
