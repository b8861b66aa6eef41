"""Stages: within their time, apart from each other, and gone with all that they started."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.stages import GRACE, RECORD, CannotRun, Command, Stage, run_stages
from tests.patience import patient
from tests.programs import until

ROOT = Path(__file__).parents[2]


def shell(script: str) -> Command:
    return ("sh", "-c", script)


def stage(name: str, *scripts: str, limit: float = patient(10), jobs: int = 1) -> Stage:
    return Stage(name, limit, lambda: [shell(script) for script in scripts], jobs)


def run(out: Path, *stages: Stage, resume: bool = False) -> dict[str, str]:
    outcomes = run_stages(stages, out, resume=resume)
    return {name: outcome.status for name, outcome in outcomes.items()}


def record(out: Path) -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = json.loads((out / RECORD).read_text())
    return found


def processes_with(word: str) -> list[str]:
    """Command lines of what still lives."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            state = path.with_name("stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:  # it has ended in the meantime
            continue
        if word in line and state != "Z" and "pytest" not in line:
            found.append(line)
    return found


def assert_gone(word: str) -> None:
    """Ending takes the kernel a moment."""
    until(lambda: not processes_with(word))


def test_a_stage_that_fails_does_not_lose_the_others(tmp_path):
    status = run(
        tmp_path, stage("one", "exit 3"), stage("two", "echo fine"), stage("three", "no-such-command")
    )
    assert status == {"one": "failed", "two": "passed", "three": "failed"}
    assert record(tmp_path)["one"]["reason"] == "sh -c 'exit 3' (3)"
    assert (tmp_path / "two" / "0.log").read_text() == "fine\n"


@pytest.mark.parametrize("stubborn", ["", "trap '' TERM; "], ids=["ends", "ignores_the_signal"])
def test_a_stage_that_exceeds_its_time_leaves_no_process(tmp_path, stubborn):
    mark = f"987{tmp_path.stat().st_ino}"  # seconds, which nobody else sleeps
    scripts = [f"{stubborn}sleep {mark} & sleep {mark}", "sleep 0", f"sleep {mark}"]
    start = time.monotonic()
    status = run(tmp_path, stage("slow", *scripts, limit=0.5), stage("next", "true"))
    assert time.monotonic() - start < 0.5 + GRACE + patient(60)
    assert status == {"slow": "out of time", "next": "passed"}
    assert_gone(mark)
    began = record(tmp_path)["slow"]["commands"]
    assert isinstance(began, list)
    assert [one["exit_code"] for one in began] == [None, None, None]


def test_commands_of_a_stage_run_at_once_where_they_may(tmp_path):
    here = tmp_path / "here"
    here.mkdir()
    all_are_here = f"[ $(ls {here} | wc -l) -eq 6 ]"
    meeting = [f"touch {here}/{i}; until {all_are_here}; do sleep 0.02; done" for i in range(6)]
    assert run(tmp_path / "out", stage("wide", *meeting, jobs=6)) == {"wide": "passed"}


def test_resuming_leaves_out_what_passed_and_keeps_its_files(tmp_path):
    first, second = stage("first", "date +%N"), stage("second", f"test -e {tmp_path}/now")
    assert run(tmp_path, first, second) == {"first": "passed", "second": "failed"}
    seen = (tmp_path / "first" / "0.log").read_text()
    (tmp_path / "now").touch()
    assert run(tmp_path, first, second, resume=True) == {"second": "passed"}
    assert (tmp_path / "first" / "0.log").read_text() == seen
    assert {name: one["status"] for name, one in record(tmp_path).items()} == {
        "first": "passed",
        "second": "passed",
    }
    assert run(tmp_path, first) == {"first": "passed"}, "asked for by name: run again"
    assert (tmp_path / "first" / "0.log").read_text() != seen


def test_what_cannot_run_is_skipped_with_its_reason(tmp_path):
    def commands() -> Sequence[Command]:
        raise CannotRun("no tool")

    assert run(tmp_path, Stage("absent", 5.0, commands), stage("next", "true")) == {
        "absent": "skipped",
        "next": "passed",
    }
    assert record(tmp_path)["absent"]["reason"] == "no tool"
