"""`python -m tpkernels check` sees what costs cycles alone, and says what is waited for."""

import json
import re

import pytest
import triton

from tests.cli.test_check import check as check
from tests.cli.test_check import copy as copy
from tests.cli.test_check import plant
from tpkernels.gate.budgets import minor_version, read

POINTER = "linear/pointer/bf16/128x128x32-w8-s3-p1/gelu_tanh+bias+z"
DGRAD = "dgrad/pointer/bf16/16x64x64-w4-s3-p1/gelu_tanh+db"
SMALL = "publish/pointer/bf16/one"
PLANTED_RECIPES = f"""
def recipes(shipped=recipes):
    from dataclasses import replace

    linear, dgrad, small = (shipped()[name] for name in {(POINTER, DGRAD, SMALL)})
    staged = replace(linear, of=replace(linear.of, tile=replace(linear.of.tile, num_stages=3)))
    parted = replace(dgrad, of=replace(dgrad.of, tile=replace(dgrad.of.tile, parts=1)))
    return {{recipe.name: recipe for recipe in (staged, parted, small)}}
"""


@pytest.fixture
def of_hopper(check):
    """The check; returns what is wrong, by entry."""

    def checked(*arguments):
        ran = check("--arch", "sm_90", "--skip", "numerics", "--json", "report.json", *arguments)
        found = {POINTER: [], DGRAD: [], SMALL: []}
        for name, words in re.findall(r"^entry (\S+) on sm_90: (.*)$", ran.stdout, re.MULTILINE):
            found[name].append(words)
        assert ran.returncode == any(found.values()), ran.stdout
        return found

    return checked


def test_check_is_red_on_a_stage_less_on_loads_one_after_the_other_and_on_the_unknown(copy, of_hopper):
    with (copy / "tpkernels" / "gate" / "catalog.py").open("a") as file:
        file.write(PLANTED_RECIPES)
    assert of_hopper("--update") == {POINTER: [], DGRAD: [], SMALL: []}
    rows = read(copy / "tpkernels" / "kernels" / "budgets.json")[minor_version(triton.__version__)].rows
    for row in json.loads((copy / "report.json").read_text())["compiled"]:
        recorded = {name: stretch.cycles for name, stretch in rows["sm_90"][row["entry"]].cycles.items()}
        assert recorded == {name: round(row["cost"][name]["cycles"]) for name in recorded}
        assert "edge" in recorded

    # parts are stored before the next one's z is loaded
    plant(copy, "gate/catalog.py", "parts=1)", "parts=4)")
    plant(copy, "gate/catalog.py", "num_stages=3)", "num_stages=2)")
    found = of_hopper()
    (step,) = (one for one in found[POINTER] if one.startswith("step "))
    assert re.fullmatch(r"step [\d,]+ -> [\d,]+ cycles: waits for copies", step)
    (edge,) = (one for one in found[DGRAD] if one.startswith("edge "))
    assert re.fullmatch(r"edge [\d,]+ -> [\d,]+ cycles: \d loads awaited one after the other", edge)

    plant(copy, "gate/clock/meanings.py", '"HGMMA"', '"HFROB"')
    for name, unknown in ((POINTER, ["HGMMA"]), (SMALL, [])):
        words = " ".join(of_hopper("--only", name)[name])
        assert re.findall("cannot be clocked: UnknownInstruction: .*(HGMMA)", words) == unknown
