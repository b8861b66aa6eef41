"""Whoever adds a kernel is told what else it needs: an entry in the catalog, a case in the gate, plans."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tpkernels.kernels import launch
from tpkernels.registered.entries import catalog
from tpkernels.registered.numeric_cases import cases

SOURCES = {path.stem: path.read_text() for path in Path(launch.__file__).parent.glob("*.py")}
CALLED = {"add_slots", "sum_partials"}  # by launchers that have plans


def functions_of(source: str) -> Iterator[tuple[str, list[str]]]:
    """Functions of a module and their decorators."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, [ast.unparse(decorator) for decorator in node.decorator_list]


def kernels_of(source: str) -> set[str]:
    """The functions that are launched: decorated by triton.jit, and named as kernels are."""
    return {
        name
        for name, decorators in functions_of(source)
        if name.endswith("_kernel") and any("triton.jit" in one for one in decorators)
    }


def launchers_of(source: str, *decorated: list[str]) -> set[str]:
    """The public functions of a file that holds a kernel."""
    public = {name for name, by in functions_of(source) if by in decorated and not name.startswith("_")}
    return public if kernels_of(source) else set()


def not_in_catalog(sources: dict[str, str]) -> set[tuple[str, str]]:
    held = {(entry.module.removeprefix("tpkernels.kernels."), entry.function) for entry in catalog()}
    return {(module, name) for module, source in sources.items() for name in kernels_of(source)} - held


def without_numeric_case(sources: dict[str, str]) -> set[str]:
    computed = {word for case in cases() for word in case.name.split("/")}
    return set().union(*(launchers_of(source, [], ["planned"]) for source in sources.values())) - computed


def without_plans(sources: dict[str, str]) -> set[str]:
    return set().union(*(launchers_of(source, []) for source in sources.values()))


def test_every_kernel_has_an_entry_a_case_and_plans():
    assert not not_in_catalog(SOURCES), "give it an entry: see registered/entries.py"
    assert not without_numeric_case(SOURCES), "give it a case: see registered/numeric_cases.py"
    assert without_plans(SOURCES) == CALLED, "decorate it: see launch_plans.py"


NEWCOMER = """
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


def test_newcomer_is_noticed():
    newcomer = {"softmax": NEWCOMER}
    assert not_in_catalog(newcomer) == {("softmax", "_softmax_kernel")}
    assert without_numeric_case(newcomer) == {"softmax"}
    assert without_plans(newcomer) == {"softmax"}
    assert launchers_of(SOURCES["wgrad"], ["planned"]) == {"wgrad", "wgrad_accumulate_"}
