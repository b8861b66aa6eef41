"""Each mistake in a gate.toml is a line that names file, kernel and key."""

from __future__ import annotations

import sys

import pytest

from tpkernels.gate.user_kernels.config import read
from tpkernels.gate.user_kernels.record import ConfigError, value_of, whole_number
from tpkernels.gate.user_kernels.table import own_kernel

if sys.version_info < (3, 11):
    pytest.importorskip("tomli")

SOUND = """
[kernels.scale]
kernel = "kernels:scale_kernel"
signature = { x = "*bf16", y = "*bf16", factor = "fp32", columns = "i32" }
constants = { BLOCK = 128 }
rules = ["no_spills"]
sizes = { rows = 512, columns = 1024 }
shapes = { x = ["rows", "columns"], y = ["rows", "columns"] }
values = { factor = 0.5 }
grid = ["rows * cdiv(columns, BLOCK)"]
oracle = "oracles:scale"
outputs = ["y"]
"""
MISTAKES = {
    "no_toml": ("[kernels.scale]", "[kernels.scale", r": Expected '\]'"),
    "no_kernels": (SOUND, "", r": kernels: expected tables such as"),
    "key_of_the_file": (SOUND, "budget = 'b.json'" + SOUND, ": budget: unknown; known are budgets, "),
    "budgets": (SOUND, "budgets = 3" + SOUND, ": budgets: expected the path of a file, got 3"),
    "name": ("kernels.scale]", 'kernels."a scale"]', "a scale: name: expected letters, digits"),
    "unknown_key": ("rules =", "rule =", "scale: rule: unknown; known are kernel, signature, "),
    "missing_key": ('kernel = "kernels:scale_kernel"', "", "scale: kernel: is missing"),
    "kernel_without_module": ("kernels:scale_", "scale_", 'kernel: expected "module:function"'),
    "type_of_a_key": ("sizes = {", "num_warps = '4'\nsizes = {", "num_warps: expected an integer, got '4'"),
    "bool_for_an_integer": ("rows = 512", "rows = true", "sizes.rows: expected an integer, got True"),
    "table_for_a_list": ('rules = ["no_spills"]', "rules = {}", "rules: expected a list, got {}"),
    "unknown_type": ('"fp32"', '"float"', "signature.factor: expected a type such as .*, got 'float'"),
    "constexpr": ('"fp32"', '"constexpr"', "signature.factor: is compiled in"),
    "argument_twice": ("BLOCK = 128", "BLOCK = 128, x = 1", "constants.x: is in signature too"),
    "unknown_rule": ('"no_spills"', '"no_spill"', "rules: expected some of no_spills, .*; got 'no_spill'"),
    "unknown_gpu": ("rules", 'architectures = ["sm_42"]\nrules', "architectures: expected some of .*'sm_42'"),
    "warps": ("rules", "num_warps = 3\nrules", "num_warps: expected a power of two up to 32, got 3"),
    "stages": ("rules", "num_stages = 0\nrules", "num_stages: expected 1 or more, got 0"),
    "lacking_shape": (', y = ["rows", "columns"] }', " }", "shapes: lacks 'y'"),
    "shape_of_a_number": ("shapes = {", "shapes = { columns = [1],", "shapes: 'columns' is no tensor"),
    "shape_of_no_name": ('y = ["rows"', 'y = ["row"', "shapes.y: 'row' is none of the names BLOCK, "),
    "shape_of_a_fraction": ('y = ["rows"', 'y = ["rows / 7"', "shapes.y: expected an integer of 1 or more"),
    "shape_of_nothing": ('y = ["rows"', 'y = ["rows - 512"', "shapes.y: expected an integer of 1 .* is 0"),
    "no_expression": ("cdiv(columns, BLOCK)", "cdiv(columns", "grid: 'rows .* is no expression"),
    "code": ("cdiv(columns, BLOCK)", "exit(3)", r"grid: 'exit\(3\)': expected "),
    "division_by_zero": ("cdiv(columns, BLOCK)", "columns // 0", "grid: .* has no value: .*zero"),
    "no_grid": ('grid = ["rows * cdiv(columns, BLOCK)"]', "", "grid: expected one to three"),
    "value_of_a_tensor": ("factor = 0.5", "factor = 0.5, x = 2", "values.x: is a tensor"),
    "value_of_nothing": ("factor = 0.5", "factr = 0.5", "values: 'factr' is no argument of signature"),
    "lacking_value": ("values = { factor = 0.5 }", "", "values.factor: 'factor' is none of the names"),
    "large_value": ("columns = 1024 }", "columns = 4294967296 }", "values.columns: expected an i32, got"),
    "strides": ("grid", 'strides = { x = ["columns"] }\ngrid', "strides.x: expected 2, got 1"),
    "no_outputs": ('outputs = ["y"]', "", "outputs: is missing"),
    "output_of_no_tensor": ('outputs = ["y"]', 'outputs = ["z"]', "outputs: 'z' is no tensor of signature"),
    "no_oracle": ('oracle = "oracles:scale"', "", "outputs: is of use with an oracle only"),
    "integers": ('y = "*bf16"', 'y = "*i32", at = "*i64"', "shapes: lacks 'at'"),
    "tile": ("outputs", "tile = { rows = 1 }\noutputs", "tile: went together with the model of cycles"),
    "step": ("outputs", "step = { columns = 64 }\noutputs", "step: went together with the model of cycles"),
    "workload": ("outputs", "workload = 'a:b'\noutputs", "workload: went together with the model of cycles"),
    "descriptor": (
        'x = "*bf16"',
        'x = "tensordesc<bf16[1, 2, 64]>"',
        "shapes.x: expected 3 sizes",
    ),
    "tolerance": ("outputs", "tolerance = { bf16 = 2 }\noutputs", "tolerance.bf16: expected a part of 1"),
    "fill": ("outputs", 'fill = { x = "random" }\noutputs', "fill.x: expected normal, .*got 'random'"),
    "fill_of_floats": ("outputs", "fill = { x = [0, 3] }\noutputs", "fill.x: it holds bf16: expected normal"),
}


def config(folder, text):
    path = folder / "gate.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(("sound", "mistaken", "told"), MISTAKES.values(), ids=MISTAKES.keys())
def test_mistake_is_told_by_file_and_key(sound, mistaken, told, tmp_path):
    assert sound in SOUND
    path = config(tmp_path, SOUND.replace(sound, mistaken))
    where = "" if told.startswith(":") else ": kernels."
    with pytest.raises(ConfigError, match=f"^{path}{where}.*{told}") as raised:
        read(path)
    assert "\n" not in str(raised.value)


def test_sound_config_is_read(tmp_path):
    found = read(config(tmp_path, SOUND))
    assert found.budgets == tmp_path / "gate-budgets.json"
    assert found.folder == tmp_path
    (own,) = found.kernels
    assert own == own_kernel("scale", own.as_table())
    values = own.at(own.sizes)
    assert values.grid == (512 * 8,)
    assert values.shapes == {"x": (512, 1024), "y": (512, 1024)}
    assert values.strides == {"x": (1024, 1), "y": (1024, 1)}
    assert values.numbers == {"factor": 0.5, "columns": 1024}


def test_missing_file_and_another_extension_are_told(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.toml: No such file or directory"):
        read(tmp_path / "nowhere.toml")
    (tmp_path / "my-gate.py").write_text("")
    with pytest.raises(ConfigError, match=r"my-gate\.py: a module of this name cannot be imported"):
        read(tmp_path / "my-gate.py")


def test_expressions_are_arithmetic_alone():
    names = {"M": 300, "x": 0.5}
    assert value_of("-cdiv(M, 128) * 2 + M % 7 - max(M // 100, 1)", names) == -6 + 6 - 3
    assert value_of(" M * x ", names) == 150.0
    assert whole_number(7, names) == 7
    bad_ones = "__import__('os')", "M.bit_length()", "[M]", "M if M else 1", "'a'", "M ** M", "cdiv(M, b=1)"
    for bad in bad_ones:
        with pytest.raises(ValueError, match=r"expected|none of the names"):
            value_of(bad, names)
    with pytest.raises(ValueError, match="has no value"):
        value_of("cdiv(M)", names)
