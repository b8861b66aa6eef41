"""The page of compiled kernels says of every entry what the table of budgets says."""

from pathlib import Path

from bench import waves
from tests.gate.test_budgets import compiled_by
from tpkernels.gate import budgets
from tpkernels.gate.ahead_of_time import ARCHITECTURES
from tpkernels.gate.budgets import REGISTER_UNIT

PAGE = Path(__file__).parents[2] / "docs" / "measured-kernels.md"
MINORS = ("3.6", "3.7")  # in the order of the page's columns


def rows_of(page: str) -> dict[tuple[str, str], list[list[int]]]:
    """(architecture, entry) -> registers, shared memory and spills, each of every Triton."""
    rows, architecture = {}, ""
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("## "):
            architecture = line.removeprefix("## ")
        elif cells[0] == "entry":
            assert cells[:4] == ["entry", "registers", "shared", "spills"]
        elif architecture in ARCHITECTURES and cells[0] and cells[0] != "---":
            numbers = [[int(n.replace(",", "")) for n in cell.split(" / ")] for cell in cells[1:4]]
            rows[architecture, cells[0]] = [n * len(MINORS) if len(n) == 1 else n for n in numbers]
    return rows


def test_page_of_kernels_agrees_with_the_budgets():
    rows = rows_of(PAGE.read_text())
    for i, minor in enumerate(MINORS):
        table = budgets.read()[minor]
        ours = {key: row for key, row in rows.items() if compiled_by(minor, key[1])}
        assert ours.keys() == table.keys(), "write it anew, see bench/kernel_table.py"
        for (architecture, name), (registers, shared, spills) in ours.items():
            budget = table.of(architecture, name)
            rounded = -(-registers[i] // REGISTER_UNIT) * REGISTER_UNIT
            assert (rounded, shared[i], spills[i]) == (budget.registers, budget.shared, budget.spills), name


def test_page_of_waves_is_todays_arithmetic():
    assert PAGE.read_text().endswith("\n".join(waves.table()) + "\n"), (
        "write it anew, see bench/kernel_table.py"
    )


def test_page_of_kernels_has_the_cycles_of_the_budgets():
    """With the version of Triton of the last number."""
    wanted, found, columns = budgets.read()[MINORS[-1]].rows["sm_90"], {}, []
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        columns = cells if cells[0] == "entry" else columns
        if "of an edge" in columns and cells[0] in wanted:
            numbers = cells[columns.index("cycles of a step")], cells[columns.index("of an edge")]
            found[cells[0]] = [number.split(" / ")[-1] for number in numbers]
    for name, row in wanted.items():
        told = [f"{row.cycles[one].cycles:,.0f}" if one in row.cycles else "-" for one in ("step", "edge")]
        assert found.get(name) == told, f"{name}: write the page anew, see bench/kernel_table.py"
