"""Public names, as the stubs beside the packages' `__init__` say them, and what the first use loads."""

import json
from importlib import import_module

import pytest

import tpkernels
from tests.programs import ran
from tpkernels import ops

LOADED = """
import json, sys
from tpkernels.ops import column_linear
files = {name: module.__file__ for name, module in sys.modules.items() if name.split(".")[0] == "tpkernels"}
print(json.dumps({name: len(open(file).readlines()) for name, file in files.items()}))
"""
UNUSED = ("vocab", "quantize", "segment", "norm", "autotune", "timing", "ways", "symmetric", "shared")


@pytest.mark.parametrize("package", [tpkernels, ops], ids=lambda package: package.__name__)
def test_every_public_name_can_be_imported(package):
    for name in package.__all__:
        assert getattr(package, name) is not None
        assert name in dir(package)
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = package.nonsense


def test_an_ops_name_is_its_function_whatever_was_imported_before():
    for name in ops.__all__:
        function = getattr(ops, name)
        import_module(function.__module__)
        assert callable(function)
        assert getattr(ops, name) is function


def test_an_op_loads_what_it_needs_and_little_else():
    anew = {"TPKERNELS_TUNE": "1"}  # a fork with a variable of ours imports the package again
    told = ran("-c", LOADED, environment=anew)
    lines = json.loads(told.stdout)
    ours = [name.removeprefix("tpkernels.ops.") for name in lines]
    assert [name for name in ours if any(word in name for word in UNUSED)] == []
    assert len(lines) <= 60
    assert sum(lines.values()) <= 9500
