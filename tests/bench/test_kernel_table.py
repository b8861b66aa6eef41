"""The page of compiled kernels says of every entry what the table of budgets says."""

from pathlib import Path

from bench import kernel_table, waves
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


def test_rows_are_read_with_one_number_or_two():
    head = "## sm_80\n\n| entry | registers | shared | spills | instructions |\n|---|---|---|---|---|\n"
    page = head + "| a/b | 147 / 148 | 8,192 | 0 | |"
    assert rows_of(page) == {("sm_80", "a/b"): [[147, 148], [8192, 8192], [0, 0]]}


def test_page_of_waves_is_todays_arithmetic():
    assert PAGE.read_text().endswith("\n".join(waves.table()) + "\n"), (
        "write it anew, see bench/kernel_table.py"
    )


def test_waves_of_a_layer_are_those_counted_by_hand():
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in waves.table() if "|" in line]
    assert rows[0] == ["layer, 8,192 tokens", "kernel", "result", "tile", "tiles", "waves", "busy"]
    assert len(rows) == 2 + 2 * 2 * 4 * 3  # models, tensor sizes, layers, kernels
    qkv = next(row for row in rows if row[:2] == ["llama3-8b, tp 1, qkv", "linear"])
    assert qkv[2:3] + qkv[4:] == ["8,192 x 6,144", "1,536", "11.64", "97%"]  # 64 x 24 tiles, 132 at once


def test_a_row_says_what_epilogues_wait_for():
    facts = {"registers": 168, "shared": 1000, "spills": 0, "instructions": {"HGMMA": 4, "all": 9}}
    found = {"blocks": 1, "exposed_waits": 8, "serial_stores": 11, "loads_during_stores": True}
    reports = [
        {
            "versions": {"triton": version},
            "compiled": [{"architecture": "sm_90", "entry": "a/b", "facts": one}],
        }
        for version, one in (("3.6.0", facts), ("3.7.1", facts | found | {"role_registers": [240, 24]}))
    ]
    lines = [*kernel_table.table("2026-01-01", reports)]
    assert lines[2].startswith("| entry | registers | shared | spills | blocks an SM | exposed waits |")
    assert lines[2].count("|") == lines[3].count("|") == lines[4].count("|")
    assert lines[4] == ("| a/b | 168 | 1,000 | 0 | - / 1 | - / 8 | - / 11 | loads | HGMMA 4, roles 240/24 |")
    assert rows_of("\n".join(lines)) == {("sm_90", "a/b"): [[168, 168], [1000, 1000], [0, 0]]}


def test_a_row_has_cycles_where_anything_was_clocked():
    facts = {"registers": 168, "shared": 1000, "spills": 0, "instructions": {}}
    cost = {"step": {"cycles": 1040.4}, "edge": {"cycles": 5950.0}}
    costs = {"a/b": [None, cost], "c/d": [cost | {"step": None}] * 2}
    reports = [
        {
            "versions": {"triton": version},
            "compiled": [
                {"architecture": "sm_90", "entry": name, "facts": facts, "cost": both[i]}
                for name, both in costs.items()
            ],
        }
        for i, version in enumerate(("3.6.0", "3.7.1"))
    ]
    lines = [*kernel_table.table("2026-01-01", reports)]
    assert "| serial stores | cycles of a step | of an edge | beside stores |" in lines[2]
    assert "| - / 1,040 | - / 5,950 |" in lines[4]
    assert "| - | 5,950 |" in lines[5]


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
