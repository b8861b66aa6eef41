"""Commands in stages, each within its time. One that fails or hangs leaves the others, and no process.

Each result is a line of `results.jsonl`, written at once, so that a limit loses none.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from tpkernels.files import parsed

Command = Sequence[str]
Status = Literal["passed", "failed", "out of time", "skipped"]

GRACE = 3.0  # seconds between asking processes to end and ending them
RESULTS, LOG, TAR = "results.jsonl", "log.txt", "gpu.tar"  # files of a run: lines, output, and all files
STAGE = "stage"  # the name of a stage's own line, its last
PROCESS = "process "  # how names of processes' lines begin
SHOWN = 2000  # characters of a failed command's output in its line


class CannotRun(RuntimeError):
    """Why a stage is left out, in words."""


@dataclass(frozen=True)
class Stage:
    """Commands by name. Those that run one after another share the time that is left evenly."""

    name: str
    limit: float  # seconds, of all commands together
    commands: Callable[[], Mapping[str, Command]]  # asked for when its turn comes; may raise CannotRun
    jobs: int = 1  # commands at once
    fine: frozenset[int] = frozenset({0})  # exit codes


@dataclass(frozen=True)
class Result:
    """A line of `results.jsonl`: of a case, of a command, or of a stage."""

    stage: str
    name: str
    status: Status
    seconds: float
    values: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""

    def write(self, out: Path) -> None:
        """Append the line by one call, so that processes may write at once, and be killed."""
        line = json.dumps(asdict(self), allow_nan=False) + "\n"
        descriptor = os.open(out / RESULTS, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)


def results_in(path: Path) -> list[Result]:
    """The lines of a file; ValueError for a line that is not a result."""
    names = {one.name for one in fields(Result)}
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        value = parsed(line)
        if not isinstance(value, dict) or value.keys() != names:
            raise ValueError(f"{path}: line {number}: expected an object of {', '.join(sorted(names))}")
        found.append(Result(**value))
    return found


def run_stages(stages: Sequence[Stage], out: Path, *, resume: bool = False) -> dict[str, Status]:
    """Run the stages in turn; their lines replace earlier ones of theirs. All files end up in a tar, too.

    resume: leave out what passed before
    """
    out.mkdir(parents=True, exist_ok=True)
    try:
        before = results_in(out / RESULTS)
    except (OSError, ValueError):  # none yet, or not of ours
        before = []
    passed = {one.stage for one in before if resume and one.name == STAGE and one.status == "passed"}
    stages = [stage for stage in stages if stage.name not in passed]
    anew = {stage.name for stage in stages}
    (out / RESULTS).unlink(missing_ok=True)
    for one in before:
        if one.stage not in anew:
            one.write(out)
    try:
        return {stage.name: run_stage(stage, out) for stage in stages}
    finally:
        files = sorted(path for path in out.iterdir() if path.is_file() and path.name != TAR)
        with tarfile.open(out / TAR, "w") as tar:
            for path in files:
                tar.add(path, path.name)


def run_stage(stage: Stage, out: Path) -> Status:
    """Run a stage's commands, and write a line of each and of the stage."""
    print(f"{stage.name}: at most {stage.limit:.0f} s", flush=True)
    start, begun = time.monotonic(), time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    status: Status = "failed"
    error = "interrupted"
    try:
        status, error = _ran(stage, out, start + stage.limit)
    except CannotRun as why:
        status, error = "skipped", str(why)
    finally:
        seconds = round(time.monotonic() - start, 2)
        values = {"limit": stage.limit, "begun": begun}
        Result(stage.name, STAGE, status, seconds, values, error).write(out)
        reason = f": {error}" if error else ""
        print(f"{stage.name}: {status} after {seconds:.0f} s{reason}", flush=True)
    return status


def _ran(stage: Stage, out: Path, deadline: float) -> tuple[Status, str]:
    commands = stage.commands()
    started: list[subprocess.Popen[bytes]] = []
    with ThreadPoolExecutor(stage.jobs) as pool:
        running = [
            pool.submit(_run, stage, name, command, len(commands) - number, out, deadline, started)
            for number, (name, command) in enumerate(commands.items())
        ]
        try:
            ran = [one.result() for one in running]
        except BaseException:  # Ctrl-C or SIGTERM, which reach no session of theirs
            pool.shutdown(wait=False, cancel_futures=True)
            for process in started:
                _signal(process, signal.SIGKILL)
            raise
    worst: Status = "passed"
    for status in ("failed", "out of time"):
        if any(one.status == status for one in ran):
            worst = status
    return worst, "; ".join(
        f"{one.name.removeprefix(PROCESS)}: {one.status}" for one in ran if one.status != "passed"
    )


def _run(
    stage: Stage,
    name: str,
    command: Command,
    left: int,
    out: Path,
    deadline: float,
    started: list[subprocess.Popen[bytes]],
) -> Result:
    """Run a command in a session of its own, so that all that it started can be ended with it.

    left: commands from this one on
    """
    start, words, line = time.monotonic(), shlex.join(command), f"{PROCESS}{name}"
    if start >= deadline:
        result = Result(stage.name, line, "out of time", 0.0, {}, "not begun")
        result.write(out)
        return result
    code: int | None = None
    with tempfile.TemporaryFile() as file:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
            )
        except OSError as error:
            file.write(str(error).encode())
            code = 127  # as a shell says it
        else:
            started.append(process)
            try:
                code = process.wait((deadline - start) / (left if stage.jobs == 1 else 1))
            except subprocess.TimeoutExpired:
                _signal(process, signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE)
            _signal(process, signal.SIGKILL)  # whatever it started
            with suppress(subprocess.TimeoutExpired):  # a driver may hold what was killed
                process.wait(GRACE)
        file.seek(0)
        said = file.read().decode(errors="replace")
    with (out / LOG).open("a", encoding="utf-8") as log:
        log.write(f"== {stage.name} {name}: {words}\n{said}\n")
    seconds = round(time.monotonic() - start, 2)
    if code in stage.fine:
        result = Result(stage.name, line, "passed", seconds)
    elif code is None:
        result = Result(stage.name, line, "out of time", seconds, {}, said[-SHOWN:].strip())
    else:
        ended = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        result = Result(stage.name, line, "failed", seconds, {}, f"{ended}: {said[-SHOWN:].strip()}")
    result.write(out)
    return result


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """To the whole session; it may have ended in the meantime."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)
