"""`python -m tpkernels check` sees what costs cycles alone, and says what is waited for."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import triton

from tests.cli.test_check import check, copied, plant
from tpkernels.gate.budgets import minor_version, read

POINTER = "linear/pointer/bf16/128x128x32-w8-s3-p1/gelu_tanh+bias+z"
DGRAD = "dgrad/pointer/bf16/16x64x64-w4-s3-p1/gelu_tanh+db"
PLANTED_CATALOG = f"""
from dataclasses import replace

def recipes(shipped=recipes):
    linear, dgrad = (shipped()[name] for name in {(POINTER, DGRAD)})
    parted = replace(dgrad.of, tile=replace(dgrad.of.tile, parts=1))
    return {{linear.name: linear, dgrad.name: replace(dgrad, of=parted)}}

def catalog():
    linear, dgrad = (recipe.entry() for recipe in recipes().values())
    return replace(linear, num_stages=3), dgrad
"""


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """A copy with two kernels, whose budgets are recorded."""
    folder = copied(tmp_path)
    with (folder / "tpkernels" / "gate" / "catalog.py").open("a") as file:
        file.write(PLANTED_CATALOG)
    ran = of_hopper(folder, "--update")
    assert ran.returncode == 0, ran.stdout
    return folder


def of_hopper(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return check(folder, "--arch", "sm_90", "--skip", "numerics", "--json", "report.json", *arguments)


def failures(ran: subprocess.CompletedProcess[str], name: str) -> list[str]:
    lines = (line for line in ran.stdout.splitlines() if line.startswith(f"entry {name} on sm_90: "))
    return [line.partition(" on sm_90: ")[2] for line in lines]


def test_check_is_red_on_a_stage_less_on_loads_one_after_the_other_and_on_the_unknown(recorded):
    rows = read(recorded / "tpkernels" / "kernels" / "budgets.json")[minor_version(triton.__version__)].rows
    before = {name: row.cycles for name, row in rows["sm_90"].items()}
    for row in json.loads((recorded / "report.json").read_text())["compiled"]:
        for name in ("step", "edge"):
            assert round(row["cost"][name]["cycles"]) == before[row["entry"]][name].cycles

    # parts are stored before the next one's z is loaded
    plant(recorded, "gate/catalog.py", "parts=1)", "parts=4)")
    plant(recorded, "gate/catalog.py", "num_stages=3)", "num_stages=2)")
    ran = of_hopper(recorded)
    assert ran.returncode == 1
    (step,) = (one for one in failures(ran, POINTER) if one.startswith("step "))
    assert re.fullmatch(r"step [\d,]+ -> [\d,]+ cycles: waits for copies", step)
    (edge,) = (one for one in failures(ran, DGRAD) if one.startswith("edge "))
    assert re.fullmatch(r"edge [\d,]+ -> [\d,]+ cycles: \d loads awaited one after the other", edge)

    plant(recorded, "gate/clock/meanings.py", '"HGMMA"', '"HFROB"')
    ran = of_hopper(recorded)
    assert ran.returncode == 1
    assert re.match("cannot be clocked: UnknownInstruction: .*HGMMA", failures(ran, POINTER)[0])
    assert "cannot be clocked" not in "".join(failures(ran, DGRAD))
