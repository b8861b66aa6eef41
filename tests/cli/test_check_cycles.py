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
SLOTS = "add_slots/pointer/fp32/16x128/+=fp32"
PLANTED_CATALOG = f"""
from dataclasses import replace

def catalog():
    found = {{name: recipes()[name].entry() for name in {(POINTER, SLOTS)}}}
    return replace(found[{POINTER!r}], num_stages=3), found[{SLOTS!r}]
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


def test_check_is_red_on_a_stage_less_and_on_loads_one_after_the_other(recorded):
    ran = of_hopper(recorded)
    assert ran.returncode == 0, ran.stdout  # the same cycles again
    rows = read(recorded / "tpkernels" / "kernels" / "budgets.json")[minor_version(triton.__version__)].rows
    before = {name: row.cycles for name, row in rows["sm_90"].items()}
    assert set(before[POINTER]) == {"step", "edge"}
    assert set(before[SLOTS]) == {"edge"}
    compiled = json.loads((recorded / "report.json").read_text())["compiled"]
    for row in compiled:
        assert round(row["cost"]["edge"]["cycles"]) == before[row["entry"]]["edge"].cycles

    plant(recorded, "gate/catalog.py", "num_stages=3)", "num_stages=2)")
    plant(recorded, "kernels/reduce.py", "tl.static_range(SLOTS)", "tl.range(0, SLOTS, num_stages=1)")
    ran = of_hopper(recorded)
    assert ran.returncode == 1
    (step,) = (one for one in failures(ran, POINTER) if one.startswith("step "))
    assert re.fullmatch(r"step [\d,]+ -> [\d,]+ cycles: waits for copies", step)
    (edge,) = (one for one in failures(ran, SLOTS) if one.startswith("edge "))
    assert re.fullmatch(r"edge [\d,]+ -> [\d,]+ cycles: \d loads awaited one after the other", edge)


def test_check_is_red_on_what_the_clock_cannot_run(recorded):
    plant(recorded, "gate/clock/meanings.py", '"HGMMA"', '"HFROB"')
    ran = of_hopper(recorded)
    assert ran.returncode == 1
    assert re.search(r"cannot be clocked: UnknownInstruction: .*HGMMA.*", "\n".join(failures(ran, POINTER)))
    assert failures(ran, SLOTS) == []
