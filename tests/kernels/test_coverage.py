"""Whoever adds a kernel is told what else it needs: an entry in the catalog, and a case in the gate."""

import ast
from pathlib import Path

from tpkernels.kernels import launch
from tpkernels.registered.entries import catalog
from tpkernels.registered.numeric_cases import cases

SOURCES = {path.stem: path.read_text() for path in Path(launch.__file__).parent.glob("*.py")}


def kernels_of(source: str) -> set[str]:
    """The functions that are launched: decorated by triton.jit, and named as kernels are."""
    return {
        node.name
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef)
        and node.name.endswith("_kernel")
        and any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    }


def launchers_of(source: str) -> set[str]:
    """The public functions of a file that holds a kernel."""
    if not kernels_of(source):
        return set()
    return {
        node.name
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef)
        and not node.name.startswith("_")
        and all(ast.unparse(decorator) == "planned" for decorator in node.decorator_list)
    }


def without_plans(sources: dict[str, str]) -> set[str]:
    """Launchers that do each time anew what they did before."""
    return {
        node.name
        for source in sources.values()
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef)
        and node.name in launchers_of(source)
        and "planned" not in map(ast.unparse, node.decorator_list)
    }


def not_in_catalog(sources: dict[str, str]) -> set[tuple[str, str]]:
    held = {(entry.module.removeprefix("tpkernels.kernels."), entry.function) for entry in catalog()}
    return {(module, name) for module, source in sources.items() for name in kernels_of(source)} - held


def without_numeric_case(sources: dict[str, str]) -> set[str]:
    computed = {word for case in cases() for word in case.name.split("/")}
    return {name for source in sources.values() for name in launchers_of(source)} - computed


def test_every_kernel_is_in_the_catalog():
    assert not not_in_catalog(SOURCES), "give it an entry: see registered/entries.py"


def test_every_launcher_has_a_numeric_case():
    assert not without_numeric_case(SOURCES), "give it a case: see registered/numeric_cases.py"


def test_every_launcher_has_plans():
    """Beside those that other launchers call."""
    called = {"add_slots", "sum_partials"}
    assert without_plans(SOURCES) == called, "decorate it: see launch_plans.py"


def test_newcomer_is_noticed():
    newcomer = {
        "softmax": """
@triton.jit
def _softmax_kernel(x_ptr, BLOCK: tl.constexpr):
    pass

@triton.jit
def _helper(x):
    return x

def softmax(x):
    _softmax_kernel[(1,)](x, BLOCK=16)

def _check(x):
    pass
"""
    }
    assert not_in_catalog(newcomer) == {("softmax", "_softmax_kernel")}
    assert without_numeric_case(newcomer) == {"softmax"}
    assert without_plans(newcomer) == {"softmax"}
    assert launchers_of(SOURCES["wgrad"]) == {"wgrad", "wgrad_accumulate_"}
