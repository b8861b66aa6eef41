"""Every function that Megatron-Core 0.16 has in these modules is here, with its arguments and defaults."""

import inspect
from importlib import import_module
from pathlib import Path

import pytest

from tpkernels.interop.megatron_core import mappings, parallel_state, rng, utilities

OURS = {
    "parallel_state": parallel_state,
    "tensor_parallel.cross_entropy": utilities,
    "tensor_parallel.data": utilities,
    "tensor_parallel.mappings": mappings,
    "tensor_parallel.random": rng,
    "tensor_parallel.utils": utilities,
}
LISTED = Path(__file__).with_name("megatrons_names.txt").read_text().splitlines()


def call(name, function):
    """Name, arguments and defaults, but for keyword-only arguments: those of newer Megatrons."""
    said = [
        parameter.name if parameter.default is parameter.empty else f"{parameter.name}={parameter.default!r}"
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is not parameter.KEYWORD_ONLY
    ]
    return f"{name}({', '.join(said)})"


@pytest.mark.parametrize("listed", LISTED, ids=[line.partition("(")[0] for line in LISTED])
def test_function_is_here_with_its_arguments(listed):
    full = listed.partition("(")[0]
    module, _, name = full.rpartition(".")
    ours = call(full, getattr(OURS[module], name))
    # further arguments, of newer Megatrons, have defaults
    assert ours == listed or (ours.startswith(listed[:-1] + ", ") and ours.count("=") > listed.count("="))


def test_the_list_is_that_of_the_installed_megatron():
    theirs = pytest.importorskip("megatron.core", reason="needs megatron-core, for its own names")
    if not theirs.__version__.startswith("0.16."):
        pytest.skip(f"the list is of megatron-core 0.16, this is {theirs.__version__}")
    found = []
    for name in OURS:
        module = import_module(f"megatron.core.{name}")
        for each, function in vars(module).items():
            own = getattr(function, "__module__", "") == module.__name__ and each[0] != "_"
            if own and (inspect.isfunction(function) or each in ("RankGenerator", "CudaRNGStatesTracker")):
                found.append(call(f"{name}.{each}", function))
    assert sorted(found) == sorted(LISTED)


def test_every_public_name_of_the_face_exists():
    for module in set(OURS.values()):
        for name in getattr(module, "__all__", ()):
            assert hasattr(module, name), name


def test_a_difference_in_arguments_is_seen():
    assert call("f", lambda a, b=1, *, c=2: None) == "f(a, b=1)"
    assert call("f", lambda a, b=2: None) != "f(a, b=1)"
