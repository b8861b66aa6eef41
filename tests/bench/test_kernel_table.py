"""The page of compiled kernels says of every entry what the table of budgets says."""

from pathlib import Path

from tpkernels.gate import budgets
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
        elif len(cells) == 5 and cells[1][:1].isdigit():
            numbers = [[int(n.replace(",", "")) for n in cell.split(" / ")] for cell in cells[1:4]]
            rows[architecture, cells[0]] = [n * len(MINORS) if len(n) == 1 else n for n in numbers]
    return rows


def test_page_of_kernels_agrees_with_the_budgets():
    rows = rows_of(PAGE.read_text())
    for i, minor in enumerate(MINORS):
        table = budgets.read()[minor]
        assert rows.keys() == table.keys(), "write it anew, see bench/kernel_table.py"
        for (architecture, name), (registers, shared, spills) in rows.items():
            budget = table.of(architecture, name)
            rounded = -(-registers[i] // REGISTER_UNIT) * REGISTER_UNIT
            assert (rounded, shared[i], spills[i]) == (budget.registers, budget.shared, budget.spills), name


def test_rows_are_read_with_one_number_or_two():
    head = "## sm_80\n\n| entry | registers | shared | spills | instructions |\n|---|---|---|---|---|\n"
    page = head + "| a/b | 147 / 148 | 8,192 | 0 | |"
    assert rows_of(page) == {("sm_80", "a/b"): [[147, 148], [8192, 8192], [0, 0]]}
