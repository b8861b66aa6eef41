"""Commands in stages, each within its time. One that fails or hangs leaves the others, and no process.

Every command is a session of its own, so that all it started can be ended with it.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from tpkernels.files import parsed

Command = Sequence[str]
Status = Literal["passed", "failed", "out of time", "skipped"]

GRACE = 3.0  # seconds between asking processes to end and ending them
POLL = 0.05
RECORD = "stages.json"


class CannotRun(RuntimeError):
    """Why a stage is left out, in words."""


@dataclass(frozen=True)
class Stage:
    name: str
    limit: float  # seconds, of all commands together
    commands: Callable[[], Sequence[Command]]  # asked for when its turn comes; may raise CannotRun
    jobs: int = 1  # commands at once
    fine: frozenset[int] = frozenset({0})  # exit codes


@dataclass(frozen=True)
class Ran:
    command: str
    exit_code: int | None  # None: ended by us, or never begun
    seconds: float


@dataclass(frozen=True)
class Outcome:
    status: Status
    seconds: float
    limit: float
    reason: str = ""
    commands: list[Ran] = field(default_factory=list)


def run_stages(stages: Sequence[Stage], out: Path, *, resume: bool = False) -> dict[str, Outcome]:
    """Each into a folder of its own in `out`, emptied first; `out/stages.json` says how it went."""
    out.mkdir(parents=True, exist_ok=True)
    before = read_record(out)
    outcomes = {}
    for stage in stages:
        if resume and before.get(stage.name, {}).get("status") == "passed":
            print(f"{stage.name}: passed before", flush=True)
            continue
        print(f"{stage.name}: at most {stage.limit:.0f} s", flush=True)
        folder = out / stage.name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        outcome = outcomes[stage.name] = run_stage(stage, folder)
        reason = f": {outcome.reason}" if outcome.reason else ""
        print(f"{stage.name}: {outcome.status} after {outcome.seconds:.0f} s{reason}", flush=True)
        before[stage.name] = asdict(outcome)
        (out / RECORD).write_text(json.dumps(before, indent=1) + "\n", encoding="utf-8")
    return outcomes


def read_record(out: Path) -> dict[str, dict[str, object]]:
    try:
        record: dict[str, dict[str, object]] = parsed((out / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # none yet, or one that was cut off
        return {}
    return record


def run_stage(stage: Stage, folder: Path) -> Outcome:
    start = time.monotonic()
    try:
        waiting = list(stage.commands())
    except CannotRun as why:
        return Outcome("skipped", 0.0, stage.limit, str(why))
    commands = _Commands(folder)
    deadline = start + stage.limit
    try:
        while waiting or commands.running:
            while waiting and len(commands.running) < stage.jobs:
                commands.begin(waiting.pop(0))
            if time.monotonic() > deadline:
                break
            time.sleep(POLL)
            commands.collect()
        in_time = not waiting and not commands.running
    finally:  # also after Ctrl-C
        commands.end_all()
    ran = commands.ran + [Ran(shlex.join(command), None, 0.0) for command in waiting]
    seconds = round(time.monotonic() - start, 2)
    bad = [f"{one.command} ({one.exit_code})" for one in ran if one.exit_code not in {None, *stage.fine}]
    if not in_time:
        unfinished = [one.command for one in ran if one.exit_code is None]
        return Outcome("out of time", seconds, stage.limit, "; ".join([*bad, *unfinished]), ran)
    return Outcome("failed" if bad else "passed", seconds, stage.limit, "; ".join(bad), ran)


class _Commands:
    """Those that run, and those that ran. What they print is in files of their stage's folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: dict[subprocess.Popen[bytes], tuple[Command, float]] = {}
        self.running: list[subprocess.Popen[bytes]] = []
        self.ran: list[Ran] = []

    def begin(self, command: Command) -> None:
        log = self._folder / f"{len(self._started)}.log"
        with log.open("wb") as file:
            try:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
                )
            except OSError as error:
                file.write(str(error).encode())
                self.ran.append(Ran(shlex.join(command), 127, 0.0))  # as a shell says it
                return
        self._started[process] = command, time.monotonic()
        self.running.append(process)

    def collect(self) -> None:
        """What has ended."""
        for process in [process for process in self.running if process.poll() is not None]:
            self._end(process, process.returncode)

    def end_all(self) -> None:
        for process in self.running:
            _signal(process, signal.SIGTERM)
        deadline = time.monotonic() + GRACE
        for process in list(self.running):
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            self._end(process, None)

    def _end(self, process: subprocess.Popen[bytes], exit_code: int | None) -> None:
        """Nothing that a command started outlives it."""
        _signal(process, signal.SIGKILL)
        process.wait()
        self.running.remove(process)
        command, start = self._started[process]
        seconds = round(time.monotonic() - start, 2)
        self.ran.append(Ran(shlex.join(command), exit_code, seconds))


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """To the whole session; it may have ended in the meantime."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)
