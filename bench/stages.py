"""Commands in stages, each within its time. One that fails or hangs leaves the others, and no process."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from tpkernels.files import parsed

Command = Sequence[str]
Status = Literal["passed", "failed", "out of time", "skipped"]

GRACE = 3.0  # seconds between asking processes to end and ending them
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
    try:
        before = parsed((out / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # none yet, or one that was cut off
        before = {}
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


def run_stage(stage: Stage, folder: Path) -> Outcome:
    start = time.monotonic()
    try:
        commands = stage.commands()
    except CannotRun as why:
        return Outcome("skipped", 0.0, stage.limit, str(why))
    deadline = start + stage.limit
    started: list[subprocess.Popen[bytes]] = []
    with ThreadPoolExecutor(stage.jobs) as pool:
        running = [
            pool.submit(_run, command, folder / f"{number}.log", deadline, started)
            for number, command in enumerate(commands)
        ]
        try:
            ran = [one.result() for one in running]
        except BaseException:  # Ctrl-C, which reaches no session of theirs
            pool.shutdown(wait=False, cancel_futures=True)
            for process in started:
                _signal(process, signal.SIGKILL)
            raise
    seconds = round(time.monotonic() - start, 2)
    reason = "; ".join(f"{one.command} ({one.exit_code})" for one in ran if one.exit_code not in stage.fine)
    if any(one.exit_code is None for one in ran):
        return Outcome("out of time", seconds, stage.limit, reason, ran)
    return Outcome("failed" if reason else "passed", seconds, stage.limit, reason, ran)


def _run(command: Command, log: Path, deadline: float, started: list[subprocess.Popen[bytes]]) -> Ran:
    """A command in a session of its own, so that all that it started can be ended with it."""
    start, words = time.monotonic(), shlex.join(command)
    if start > deadline:
        return Ran(words, None, 0.0)
    with log.open("wb") as file:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
            )
        except OSError as error:
            file.write(str(error).encode())
            return Ran(words, 127, 0.0)  # as a shell says it
        started.append(process)
        code: int | None = None
        try:
            code = process.wait(deadline - start)
        except subprocess.TimeoutExpired:
            _signal(process, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
        _signal(process, signal.SIGKILL)  # whatever it started
        process.wait()
    return Ran(words, code, round(time.monotonic() - start, 2))


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """To the whole session; it may have ended in the meantime."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)
