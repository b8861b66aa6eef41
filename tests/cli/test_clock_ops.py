"""`python -m tpkernels clock column_linear`, as a user types it."""

import json
import re
import subprocess
import sys

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


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (["--tp", "0"], "ranks: expected at least 1, got 0"),
        (["--tp", "3"], "tokens: expected a multiple of the 3 ranks"),
        (["--tp", "100000"], "--tp: expected at most 72 ranks of one machine, got 100000"),
        (["--tokens", "-4"], "tokens: expected at least 1, got -4"),
        (["--out", "14338"], "features_out: expected a multiple of the 4 ranks, got 14338"),
        (["--gpu", "h1000"], "gpu: expected one of h200, h100, a100, got 'h1000'"),
        (["--ways", "ours"], "invalid choice: 'ours'"),
        (["--json", "/nowhere/at/all"], "cannot write to '/nowhere/at/all'"),
    ],
)
def test_what_cannot_be_is_one_line(changed, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*USUAL, *changed])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_no_torch_is_loaded():
    code = (
        "import sys; from tpkernels.cli.clock_ops import main; main(sys.argv[1:]); "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, *USUAL], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_columns_end_where_their_headings_do(capsys):
    assert main(USUAL) == 0
    lines = capsys.readouterr().out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("forward "))
    ends = [found.end() for found in re.finditer(r"\S+", lines[at].partition("   against")[0])][1:]
    for row in lines[at + 1 : at + 1 + len(WAYS)]:
        assert [found.end() for found in re.finditer(r"\S+", row)][1 : 1 + len(ends)] == ends, row
