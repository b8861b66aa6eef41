"""Known regressions are told by their cause, what did not change is left alone; each could be otherwise."""

import json

import pytest

from bench import record_regressions
from bench.__main__ import main
from bench.record_regressions import FLAGGED, compiled, judge, read
from bench.record_regressions.pairs import PAIRS, REGRESSIONS, UNCHANGED
from tests.compiled import Compiler

FACTS = read()
UNLIKE = {
    f"{pair.name}/{when}": FACTS[f"{REGRESSIONS[0].name}/{when}"]
    for pair in UNCHANGED
    for when in ("before", "after")
}


@pytest.mark.parametrize("pair", REGRESSIONS, ids=lambda pair: pair.name)
def test_a_regression_is_told_by_its_cause(pair):
    worst, *_ = judge(pair, FACTS).worse
    assert worst.what in pair.causes


@pytest.mark.parametrize("pair", REGRESSIONS, ids=lambda pair: pair.name)
def test_nothing_is_told_of_what_is_the_same(pair):
    found = judge(pair, {f"{pair.name}/{when}": FACTS[f"{pair.name}/before"] for when in ("before", "after")})
    assert (found.changes, found.is_named) == ([], False)


def test_of_unchanged_pairs_at_most_one_is_flagged():
    flagged = [pair.name for pair in UNCHANGED if judge(pair, FACTS).worse]
    assert len(flagged) <= FLAGGED, flagged


def test_there_are_enough_pairs_and_every_fact_is_of_one():
    assert (len(REGRESSIONS) >= 14, len(UNCHANGED)) == (True, 20)
    assert FACTS.keys() == {f"{pair.name}/{when}" for pair in PAIRS for when in ("before", "after")}


def test_command_prints_a_line_a_pair_and_writes_json(tmp_path, capsys):
    assert main(["record_regressions", "--json", str(tmp_path / "told.json")]) == 0
    said = capsys.readouterr().out
    named = (
        f"of {len(REGRESSIONS)} regressions {len(REGRESSIONS)} are told, {len(REGRESSIONS)} by their cause"
    )
    assert named in said
    assert "ok     two-stages                  a pipeline of 4 is one of 2" in said
    first = json.loads((tmp_path / "told.json").read_text())["pairs"][0]
    assert (first["tritons"], first["is_named"]) == (["3.6.0", "3.7.1"], True)
    assert first["changes"][0][:2] == ["worse", "occupancy"]


@pytest.mark.parametrize(
    "facts",
    [FACTS | UNLIKE, FACTS | {"two-stages/after": FACTS["two-stages/before"]}],
    ids=["many_flagged", "one_missed"],
)
def test_exit_code_is_1_if_told_otherwise(facts, monkeypatch, capsys):
    monkeypatch.setattr(record_regressions, "read", lambda: facts)
    assert main(["record_regressions"]) == 1
    assert "WRONG" in capsys.readouterr().out


@pytest.mark.sweep
def test_facts_are_those_of_the_installed_triton(compiler: Compiler):
    found = compiler.run(compiled)
    assert found == {name: FACTS[name] for name in found}
