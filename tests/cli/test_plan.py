"""`python -m tpkernels plan`, as a user types it."""

from xml.etree import ElementTree as ET

import pytest

from tests.topology.test_plan import DESCRIPTION
from tpkernels.cli import main

LESSON = ["plan", "--world-size", "16", "--tp", "2", "--pp", "4"]


def test_plan_prints_the_lesson_and_draws_it(tmp_path, capsys):
    picture = tmp_path / "plan.svg"
    assert main([*LESSON, "--svg", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(DESCRIPTION)
    assert printed.endswith(f"drawn into {picture}\n")
    assert ET.parse(picture).getroot().tag.endswith("svg")


def test_plan_shows_one_ranks_place(capsys):
    assert main([*LESSON, "--rank", "6"]) == 0
    printed = capsys.readouterr().out
    assert "rank 6 of 16" in printed
    assert "1 of 4 in [g2, g6, g10, g14]" in printed
    assert "not a member" in printed


def test_plan_takes_every_option(capsys):
    options = "--world-size 32 --tp 2 --cp 2 --ep 2 --pp 4 --virtual-pipeline 2 --split-rank 2"
    assert main(["plan", *options.split(), "--order", "tp-cp-ep-dp-pp"]) == 0
    assert "2 virtual stages on each rank, decoder from stage 2" in capsys.readouterr().out


def test_help_has_both_sets_of_options(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["plan", "--help"])
    assert exit_.value.code == 0
    printed = capsys.readouterr().out
    for option in ("--tp", "--virtual-pipeline", "--model NAME", "--gpu NAME", "--micro-batch"):
        assert f"\n  {option}" in printed
    assert printed.count("  --world-size N ") == 1
