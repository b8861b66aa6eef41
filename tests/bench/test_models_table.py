"""The page of models of transformers lists those that are tried, and says what became of them."""

from __future__ import annotations

from bench import models_table
from bench.models_table import PAGE
from tests.interop.architecture_runs import Outcome
from tests.interop.architectures import ARCHITECTURES, KINDS

RIGHT = Outcome("right", dtype="float64", apart=(0.0, 3e-8, 2e-16), losses=(4.0, 2.0), held=0.5)
WRONG = Outcome("wrong", dtype="float32", apart=(0.1, 3e-8, 0.2), losses=(4.0, 2.0), held=0.5)
REFUSED = Outcome("refused", "ValueError: 'a|b' is\n odd. Mend it", "float64")


def rows_of(page: str) -> dict[str, list[str]]:
    """By model: the cells after it."""
    found = {}
    for line in page.splitlines():
        if line.startswith("| `"):
            name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            found[name.strip("`")] = cells
    return found


def test_page_lists_the_architectures_in_their_order_and_none_that_was_split_wrongly():
    page = PAGE.read_text()
    assert list(rows_of(page)) == list(ARCHITECTURES), "write it anew: make check-transformers"
    assert [line[3:] for line in page.splitlines() if line.startswith("## ")] == list(KINDS)
    verdicts = {cells[1] for cells in rows_of(PAGE.read_text()).values()}
    assert verdicts <= {"right", "refused"}


def test_rows_say_by_how_much_and_why_not(monkeypatch):
    monkeypatch.setattr(models_table, "version", lambda name: "1.2+cpu")
    outcomes = {"A": (RIGHT, Outcome("no plan")), "B": (WRONG, RIGHT), "C": (REFUSED, WRONG)}
    page = models_table.page(outcomes, {"All of them": outcomes})
    assert rows_of(page) == {
        "A": ["fp64", "right", "0", "3e-08", "2e-16", "0.50", "no plan"],
        "B": ["fp32", "**wrong**", "1e-01", "3e-08", "2e-01", "0.50", "right (3e-08)"],
        "C": ["fp64", "refused", "", "", "", "", "**wrong** (2e-01)"],
    }
    assert "\n- `C`, refused: ValueError: 'a\\|b' is odd\n" in page
    assert "\n| **All** | 3 | 1 | 0 | 1 | 1 | 1 | 1 | 1 |\n" in page


def test_command_ends_with_an_error_if_a_model_was_split_wrongly(monkeypatch, capsys):
    ends = {}
    for outcome in (RIGHT, REFUSED, WRONG, Outcome("fails", "why")):
        monkeypatch.setattr(models_table, "tried", lambda names, mine=outcome: {"A": (mine, WRONG)})
        ends[outcome.verdict] = models_table.main(["nothing is called so"])
    assert ends == {"right": 0, "refused": 0, "wrong": 1, "fails": 1}
    assert "wrong, or failed in training: A" in capsys.readouterr().out
