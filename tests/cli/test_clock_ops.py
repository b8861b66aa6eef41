"""`python -m tpkernels clock column_linear`, as a user types it."""

import json

import pytest

from tpkernels.cli.clock_ops import OPS, main
from tpkernels.pictures.figure import can_draw
from tpkernels.planning.timeline.prediction import WAYS

USUAL = ["column_linear", "--tokens", "2048", "--in", "4096", "--out", "14336", "--tp", "4"]


@pytest.mark.parametrize("op", OPS)
def test_each_op_says_what_each_way_takes_and_what_hides_what(op, capsys):
    assert main([op, *USUAL[1:]]) == 0
    printed = capsys.readouterr().out
    assert "model: " in printed
    assert "nothing here was measured on a GPU" in printed.splitlines()[1]
    for way in WAYS:
        assert sum(line.startswith(f"{way} ") for line in printed.splitlines()) == 2, "forward and backward"
        assert f"\n{way}, backward:" in printed
    assert " behind " in printed


def test_times_are_those_of_the_file(tmp_path, capsys):
    file = tmp_path / "said.json"
    assert main([*USUAL, "--directions", "forward", "--ways", "naive", "--json", str(file)]) == 0
    said = json.loads(file.read_text())
    assert said["model"] is True
    (naive,) = said["ways"]
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("naive "))
    assert row.split()[1] == f"{1e6 * naive['seconds']:.0f}"
    assert {span["rank"] for span in naive["spans"]} == {0, 1, 2, 3}
    assert all(span["stop"] >= span["start"] for span in naive["spans"])


@pytest.mark.skipif(not can_draw(), reason="pictures need matplotlib")
@pytest.mark.parametrize("form", ["svg", "png"])
def test_a_time_line_is_drawn(tmp_path, form, capsys):
    file = tmp_path / f"lines.{form}"
    assert main([*USUAL, "--ways", "c10d", "--picture", str(file)]) == 0
    assert (b"wgrad" in file.read_bytes()) == (form == "svg")
