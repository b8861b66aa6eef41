"""What a gate.toml names is looked at in a process of its own, and must agree with the table."""

from __future__ import annotations

from dataclasses import fields, replace
from inspect import signature
from pathlib import Path

import pytest

from tpkernels.gate import register
from tpkernels.gate.user_kernels.config import inspect_kernels, read
from tpkernels.gate.user_kernels.entries import Inspected, entry_of
from tpkernels.gate.user_kernels.record import ConfigError, OwnKernel
from tpkernels.gate.user_kernels.table import own_kernel

KERNELS = """
import triton
import triton.language as tl

@triton.autotune([triton.Config({}, num_warps=8)], key=[])
@triton.jit(do_not_specialize=["count"])
def scale_kernel(x, y, stride, count, factor: tl.constexpr = 0.5, dtype: tl.constexpr = tl.float32):
    print("never printed between answers", end="")

def helper():
    pass

number = 3
print("a module that talks", end="")
"""
GLUED = """
from triton.experimental import gluon

@gluon.jit
def scale(x):
    pass
"""
TABLE = {
    "kernel": "kernels:scale_kernel",
    "signature": {"x": "*bf16", "y": "*bf16", "stride": "i32", "count": "i32"},
    "constants": {"dtype": "tl.bfloat16"},
    "sizes": {"rows": 32},
    "values": {"stride": "rows * 2", "count": "rows"},
    "shapes": {"x": ["rows"], "y": ["rows"]},
    "grid": [1],
}
INSPECTED = Inspected(
    arguments=("x", "y", "stride", "count", "factor", "dtype"),
    constexprs=("factor", "dtype"),
    defaults={"factor": 0.5},
    plain=("count",),
    unaligned=(),
)
ORACLE = {"outputs": ["y"], "oracle_sizes": [{"rows": 3}]}
NAMED = {  # changes of the table -> what is told
    "sound": ({}, None),
    "no_module": ({"kernel": "nowhere:scale"}, "kernel: importing 'nowhere': ModuleNotFoundError: No module"),
    "failing": ({"kernel": "failing:scale"}, "kernel: importing 'failing': ValueError: today"),
    "leaving": ({"kernel": "leaving:scale"}, "kernel: importing 'leaving': SystemExit: 4"),
    "no_kernel": ({"kernel": "kernels:scale"}, r"kernel: module 'kernels' \(.*kernels.py\) has no 'scale'"),
    "no_jit": ({"kernel": "kernels:helper"}, "kernel: expected a function under triton.jit, .* a function"),
    "no_oracle": ({"oracle": "kernels:ref"} | ORACLE, "oracle: module 'kernels' .* has no 'ref'"),
    "number": ({"oracle": "kernels:number"} | ORACLE, "oracle: expected a function, .* is a int"),
    "gluon": ({"kernel": "glued:scale"}, "kernel: glued:scale is written in Gluon, which is not checked"),
    "dying": ({"kernel": "dying:scale"}, "kernel: importing 'dying' ended its process with exit code 9"),
}


def test_what_is_named_is_found_or_told(tmp_path):
    (tmp_path / "kernels.py").write_text(KERNELS)
    (tmp_path / "failing.py").write_text("raise ValueError('not\\n today')")
    (tmp_path / "glued.py").write_text(GLUED)
    (tmp_path / "dying.py").write_text("import os; os._exit(9)")
    (tmp_path / "leaving.py").write_text("import sys; sys.exit(4)")
    kernels = [own_kernel(name, TABLE | changes) for name, (changes, _) in NAMED.items()]
    found = {own.name: what for own, what in inspect_kernels(kernels, tmp_path)}
    assert found.pop("sound") == INSPECTED
    for name, what in found.items():
        assert isinstance(what, ConfigError), name
        with pytest.raises(ConfigError, match=f"^{NAMED[name][1]}"):
            raise what


def test_entry_is_what_a_launch_would_compile():
    entry = entry_of(own_kernel("scale", TABLE), INSPECTED, Path("/team"))
    assert (entry.module, entry.function, entry.folder) == ("kernels", "scale_kernel", "/team")
    assert entry.arguments == TABLE["signature"]
    assert entry.aligned == {"x", "y", "stride"}, "count is not told to Triton"
    assert str(entry.constants["dtype"]) == "bf16"
    assert entry.constants["factor"] == 0.5
    assert entry.unspecialised == {"count"}
    odd = own_kernel("scale", TABLE | {"sizes": {"rows": 21}})
    assert entry_of(odd, INSPECTED, Path()).aligned == {"x", "y"}
    told = own_kernel("scale", TABLE | {"aligned": ["stride"]})
    assert entry_of(told, INSPECTED, Path()).aligned == {"stride"}


MORE = ("x", "y", "stride", "count", "factor", "dtype", "more")
ONE, NINE = ({"values": {"stride": value, "count": 1}} for value in (1, 9))
MISNAMED = {"constants": {"dtyp": "None"}}
DISAGREEING = {
    "no_argument": (MISNAMED, {}, "constants.dtyp: is no argument: kernels:scale_kernel has"),
    "lacking": ({}, {"arguments": MORE}, "signature: lacks 'more'"),
    "lacking_constant": ({}, {"arguments": MORE, "constexprs": ("more",)}, "constants: lacks 'more'"),
    "constexpr": ({}, {"constexprs": ("stride",)}, "signature.stride: is a tl.constexpr"),
    "one": (ONE, {}, "values.stride: is 1, which Triton compiles in"),
    "no_multiple": (NINE | {"aligned": ["stride"]}, {}, "aligned: stride = 9 is no"),
}


@pytest.mark.parametrize(("changes", "kernel", "told"), DISAGREEING.values(), ids=DISAGREEING.keys())
def test_table_and_kernel_that_disagree_are_told(changes, kernel, told):
    own = own_kernel("scale", TABLE | changes)
    with pytest.raises(ConfigError, match=f"^{told}"):
        entry_of(own, replace(INSPECTED, **kernel), Path())


REGISTERING = """
from kernels import scale_kernel
from tpkernels.gate import register

register(scale_kernel, {"x": "*bf16"}, num_warps=8)
for wrong in ({"rules": ["speed"]}, {}):
    try:
        register(scale_kernel, {"x": "*bf16"}, **wrong)
    except ValueError as error:
        print(error)
        assert ("rules: expected some of" if wrong else "is registered twice") in str(error)
    else:
        raise AssertionError(wrong)
"""


def test_python_registers_what_a_gate_toml_would_say(tmp_path):
    (tmp_path / "kernels.py").write_text(KERNELS)
    path = tmp_path / "own_gate.py"
    path.write_text(REGISTERING)
    found = read(path)
    assert found.budgets == tmp_path / "own_gate-budgets.json"
    table = {"kernel": "kernels:scale_kernel", "signature": {"x": "*bf16"}, "num_warps": 8}
    assert found.kernels == (own_kernel("scale_kernel", table),)
    assert {*signature(register).parameters} == {one.name for one in fields(OwnKernel)}
    path.write_text(REGISTERING + "raise KeyError('later')\n")
    with pytest.raises(ConfigError, match=r"own_gate\.py: importing it: KeyError: 'later'"):
        read(path)
