"""Stages: within their time, apart from each other, and gone with all that they started."""

from __future__ import annotations

import json
import sys
import tarfile
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from bench.stages import GRACE, LOG, RESULTS, TAR, CannotRun, Command, Result, Stage, results_in, run_stages
from tests.patience import patient
from tests.programs import until


def stage(name: str, *scripts: str, limit: float = patient(10), jobs: int = 1) -> Stage:
    commands = {str(number): ("sh", "-c", script) for number, script in enumerate(scripts)}
    return Stage(name, limit, lambda: commands, jobs)


def processes_of(out: Path, stage: str) -> list[Result]:
    return [
        one for one in results_in(out / RESULTS) if one.stage == stage and one.name.startswith("process ")
    ]


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


def test_a_stage_that_fails_does_not_lose_the_others(tmp_path):
    absent = Stage("three", patient(10), lambda: {"it": ("no-such-command",)})
    status = run_stages([stage("one", "echo no >&2; exit 3"), stage("two", "echo fine"), absent], tmp_path)
    assert status == {"one": "failed", "two": "passed", "three": "failed"}
    lines = results_in(tmp_path / RESULTS)
    names = [f"{one.stage} {one.name}" for one in lines]
    assert names == [f"{one} {two}" for one in ("one", "two") for two in ("process 0", "stage")] + [
        "three process it",
        "three stage",
    ]
    assert [one.error for one in lines[:2]] == ["exit code 3: no", "0: failed"]
    assert "fine" in (tmp_path / LOG).read_text()
    with tarfile.open(tmp_path / TAR) as tar:
        assert tar.getnames() == [LOG, RESULTS]
    assert {path.name for path in tmp_path.iterdir()} == {LOG, RESULTS, TAR}


@pytest.mark.parametrize("stubborn", ["", "trap '' TERM; "], ids=["ends", "ignores_the_signal"])
def test_a_stage_that_exceeds_its_time_leaves_no_process(tmp_path, stubborn):
    mark = f"987{tmp_path.stat().st_ino}"  # seconds, which nobody else sleeps
    scripts = [f"{stubborn}sleep {mark} & sleep {mark}"] * 2
    start = time.monotonic()
    status = run_stages([stage("slow", *scripts, limit=0.5, jobs=2), stage("next", "true")], tmp_path)
    assert time.monotonic() - start < 0.5 + GRACE + patient(60)
    assert status == {"slow": "out of time", "next": "passed"}
    until(lambda: not processes_with(mark))  # ending takes the kernel a moment
    assert [one.status for one in processes_of(tmp_path, "slow")] == ["out of time"] * 2


def test_a_command_that_hangs_leaves_those_after_it_their_time(tmp_path):
    limit = patient(4)
    assert run_stages([stage("one", f"sleep {2 * limit}", "true", limit=limit)], tmp_path) == {
        "one": "out of time"
    }
    assert [one.status for one in processes_of(tmp_path, "one")] == ["out of time", "passed"]


def test_what_a_command_dies_of_is_named(tmp_path):
    run_stages([stage("one", "kill -9 $$", "kill -SEGV $$")], tmp_path)
    assert [one.error for one in processes_of(tmp_path, "one")] == [
        "ended by SIGKILL: ",
        "ended by SIGSEGV: ",
    ]


def test_commands_of_a_stage_run_at_once_where_they_may(tmp_path):
    here = tmp_path / "here"
    here.mkdir()
    all_are_here = f"[ $(ls {here} | wc -l) -eq 6 ]"
    meeting = [f"touch {here}/{i}; until {all_are_here}; do sleep 0.02; done" for i in range(6)]
    assert run_stages([stage("wide", *meeting, jobs=6)], tmp_path / "out") == {"wide": "passed"}


def test_resuming_leaves_out_what_passed_and_keeps_its_lines(tmp_path):
    first, second = stage("first", "true"), stage("second", f"test -e {tmp_path}/now")
    assert run_stages([first, second], tmp_path) == {"first": "passed", "second": "failed"}
    seen = results_in(tmp_path / RESULTS)
    (tmp_path / "now").touch()
    assert run_stages([first, second], tmp_path, resume=True) == {"second": "passed"}
    lines = results_in(tmp_path / RESULTS)
    assert lines[:2] == seen[:2]
    assert [one.status for one in lines] == ["passed"] * 4, "lines of what ran again are replaced"
    assert run_stages([first], tmp_path) == {"first": "passed"}, "asked for by name: run again"


def test_what_cannot_run_is_skipped_with_its_reason(tmp_path):
    def commands() -> Mapping[str, Command]:
        raise CannotRun("no tool")

    status = run_stages([Stage("absent", 5.0, commands), stage("next", "true")], tmp_path)
    assert status == {"absent": "skipped", "next": "passed"}
    assert results_in(tmp_path / RESULTS)[0].error == "no tool"


def test_lines_of_many_processes_stay_whole(tmp_path):
    program = (
        "import sys; from pathlib import Path; from bench.stages import Result; "
        "[Result('one', f'{sys.argv[1]} {i}', 'passed', 0.0, {'text': 'x' * 3000}).write(Path(sys.argv[2])) "
        "for i in range(200)]"
    )
    commands = {str(i): (sys.executable, "-c", program, str(i), str(tmp_path)) for i in range(4)}
    assert run_stages([Stage("one", patient(60), lambda: commands, jobs=4)], tmp_path) == {"one": "passed"}
    assert len({one.name for one in results_in(tmp_path / RESULTS)}) == 4 * 200 + 4 + 1


@pytest.mark.parametrize("line", ["{", "[]", json.dumps({"stage": "one"})])
def test_a_line_that_is_no_result_is_refused(tmp_path, line):
    (tmp_path / RESULTS).write_text(line + "\n")
    with pytest.raises(ValueError, match=r"line 1|Expecting|JSON"):
        results_in(tmp_path / RESULTS)
