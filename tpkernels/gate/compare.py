"""The same kernels on two Tritons, or of two revisions: what got worse, and why.

Each side is compiled in a process of its own, which finds its Triton and its kernels by PYTHONPATH, and
answers with facts as lines of JSON. The gate is this one on both sides.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tpkernels.files import cache_folder
from tpkernels.gate.ahead_of_time import CompileJob, Facts, compile_all, jit_function
from tpkernels.gate.causes import Change, Severity, at_least, changes
from tpkernels.gate.child import end_with_parent, started
from tpkernels.gate.compile_gate import UsageError, jobs_of
from tpkernels.gate.occupancy import occupancy
from tpkernels.gate.render import Page, Row
from tpkernels.gate.user_kernels.children import imported_attribute
from tpkernels.gate.user_kernels.config import Config, read, suite_of
from tpkernels.gate.user_kernels.record import ConfigError

PACKAGE = Path(__file__).parents[1]
# without the folder that Python was started in, which may hold another copy of the package
_PROGRAM = "import sys; sys.path[:] = filter(None, sys.path); from tpkernels.gate.compare import main; main()"
HEADINGS = (
    *("registers", "occupancy", "spills", "shared", "copied ahead", "loads in flight", "products in flight"),
    "loop",
)
Key = tuple[str, str]  # name, architecture


@dataclass(frozen=True, slots=True)
class Wanted:
    """What both sides compile."""

    config: Path | None  # None: what `ours` returns
    ours: str  # "module:function"
    architectures: Sequence[str]
    only: str
    processes: int


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a side has its Triton and its kernels."""

    label: str  # "" for the Triton that it turns out to be
    config: Path | None
    path: Sequence[Path]  # in front of PYTHONPATH


@dataclass(frozen=True, slots=True)
class FactsOrError:
    """What a side made of one kernel."""

    facts: Facts | str  # or why there are none
    place: tuple[str, int] | None


@dataclass(frozen=True, slots=True)
class OriginFacts:
    label: str
    triton: str
    kernels: Mapping[Key, FactsOrError]


def compare(what: str, wanted: Wanted, fails: Severity, report: Callable[[object], None]) -> Page:
    """what: "triton==3.9.0", a folder with an installed triton, or a revision; UsageError if it cannot be had

    fails: the least severity that makes a kernel fail
    """
    with ExitStack() as stack:
        here = Origin("", wanted.config, [PACKAGE.parent])
        if what.startswith("triton=="):
            other = Origin("", wanted.config, [_installed(what), PACKAGE.parent])
        elif (Path(what) / "triton").is_dir():
            other = Origin("", wanted.config, [Path(what).absolute(), PACKAGE.parent])
        else:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="tpkernels-")))
            other = _revision(what, wanted.config, folder)
            here = Origin("this checkout", wanted.config, here.path)
        before, after = (_compiled(side, wanted, report) for side in (other, here))
    if before.triton != after.triton:  # an upgrade
        before, after = sorted((before, after), key=lambda found: _numbers(found.triton))
    return _page(before, after, fails)


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split("+")[0].split(".") if part.isdigit()]


def _installed(requirement: str) -> Path:
    """The folder of the user's caches where a Triton is, installed there if it was not."""
    cache = cache_folder()
    if cache is None:
        raise UsageError(f"{requirement}: there is no home folder to keep it in: set TPKERNELS_CACHE_DIR")
    folder = cache / "tritons" / requirement
    if not (folder / "triton").is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".", dir=folder.parent) as unfinished:
            pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
            command = [*pip, "--no-deps", "--target", f"{unfinished}/all", requirement]
            ran = subprocess.run(command, capture_output=True, text=True)
            if ran.returncode:
                last = (ran.stderr.strip() or "pip said nothing").splitlines()[-1]
                raise UsageError(f"cannot install {requirement}: {last}; a folder that holds it will do")
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(f"{unfinished}/all", folder)
    return folder


def _revision(revision: str, config: Path | None, folder: Path) -> Origin:
    """The kernels' repository as it was, in a folder; of this package with today's gate."""
    start = PACKAGE if config is None else config.absolute().parent
    top = Path(_git(start, "rev-parse", "--show-toplevel", why=f"{revision!r} is no Triton").decode().strip())
    known = _git(start, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}", why=f"no {revision!r}")
    tar = _git(top, "archive", known.decode().strip(), why=revision)
    subprocess.run(["tar", "-x", "-C", folder], input=tar, check=True)
    if config is not None:
        place = folder / config.absolute().relative_to(top)
        if not place.is_file():
            raise UsageError(f"{revision} has no {config.absolute().relative_to(top)}")
        return Origin(revision, place, [PACKAGE.parent])
    gate = folder / PACKAGE.relative_to(top) / "gate"
    shutil.rmtree(gate, ignore_errors=True)
    shutil.copytree(PACKAGE / "gate", gate)
    return Origin(revision, None, [gate.parents[1]])


def _git(folder: Path, *words: str, why: str) -> bytes:
    try:
        return subprocess.run(["git", "-C", folder, *words], capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", b"").decode(errors="replace").strip() or str(error)
        raise UsageError(f"--compare: {why}: git {words[0]}: {said.splitlines()[-1]}") from error


def _compiled(side: Origin, wanted: Wanted, report: Callable[[object], None]) -> OriginFacts:
    """What the process of a side answers."""
    request = {
        "config": side.config and str(side.config.absolute()),
        "ours": wanted.ours,
        "architectures": [*wanted.architectures],
        "only": wanted.only,
        "processes": wanted.processes,
    }
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    old = [variables["PYTHONPATH"]] if variables.get("PYTHONPATH") else []
    variables["PYTHONPATH"] = os.pathsep.join([*map(str, side.path), *old])
    triton, kernels = "", dict[Key, FactsOrError]()
    with started([sys.executable, "-c", _PROGRAM], json.dumps(request), variables) as child:
        for answer in map(json.loads, child.lines_until_end()):
            if "mistake" in answer:
                raise UsageError(f"{side.label}: {answer['mistake']}".removeprefix(": "))
            if "done" in answer:
                report(f"{answer['done']} ({side.label or 'Triton ' + triton})")
            elif "name" in answer:
                facts = answer["error"] or Facts.from_json(answer["facts"])
                place = (answer["file"], answer["line"]) if answer["file"] else None
                kernels[answer["name"], answer["architecture"]] = FactsOrError(facts, place)
            else:
                triton = answer["triton"]
        code, words = child.end(), child.last_words()
    if code:
        raise UsageError(f"{side.label or 'the other side'} cannot be compiled: {words}")
    return OriginFacts(side.label or f"Triton {triton}", triton, kernels)


def main() -> None:
    """The program of a side."""
    end_with_parent()
    request = json.load(sys.stdin)
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever others print does not come between our lines

    def say(**answer: Any) -> None:
        print(json.dumps(answer), file=lines, flush=True)

    try:
        for answer in _answers(request, lambda job: say(done=str(job))):
            say(**answer)
    except (ConfigError, UsageError) as error:
        say(mistake=str(error))


def _answers(request: Mapping[str, Any], report: Callable[[CompileJob], None]) -> Iterator[dict[str, Any]]:
    import triton

    yield {"triton": triton.__version__}
    path = request["config"]
    config: Config = read(Path(path)) if path else imported_attribute("ours", request["ours"])()
    jobs = jobs_of(suite_of(config), request["architectures"], request["only"])
    for job, facts in zip(jobs, compile_all(jobs, request["processes"], report), strict=True):
        place = ("", 0) if isinstance(facts, str) else _place(job)
        yield {
            "name": job.entry.name,
            "architecture": job.architecture,
            "facts": None if isinstance(facts, str) else facts.as_json(),
            "error": facts if isinstance(facts, str) else "",
            "file": place[0],
            "line": place[1],
        }


def _place(job: CompileJob) -> tuple[str, int]:
    """Where the kernel is, from where Python was started."""
    with suppress(BaseException):  # it may do anything on import: it is compiled, and that is what counts
        kernel = jit_function(job.entry)
        return os.path.relpath(kernel.fn.__code__.co_filename), kernel.starting_line_number
    return "", 0


def _page(before: OriginFacts, after: OriginFacts, fails: Severity) -> Page:
    rows = [_row(before, after, key, fails) for key in {**before.kernels, **after.kernels}]
    rows.sort(key=lambda row: not row.fails)
    counts = {
        severity: sum(bool(row.changes) and row.changes[0].severity == severity for row in rows)
        for severity in ("severe", "worse", "note", "better")
    }
    told = ", ".join(f"{count} {severity}" for severity, count in counts.items() if count) or "none differs"
    failed = sum(row.fails for row in rows)
    summary = f"{len(rows)} kernels: {told}; {failed} fail"
    return Page(f"{before.label} -> {after.label}", HEADINGS, rows, summary)


def _row(before: OriginFacts, after: OriginFacts, key: Key, fails: Severity) -> Row:
    was, now = before.kernels.get(key), after.kernels.get(key)
    place = now.place if now else None
    found = _differences(was, now, before.label, after.label, key[1])
    facts = [one.facts if one and isinstance(one.facts, Facts) else None for one in (was, now)]
    cells = [_cells(one, key[1]) for one in facts]
    pairs = [a if a == b else f"{a} -> {b}" for a, b in zip(*cells, strict=True)]
    return Row(f"{key[0]} on {key[1]}", pairs, found, bool(at_least(found, fails)), place)


def _differences(
    was: FactsOrError | None, now: FactsOrError | None, before: str, after: str, architecture: str
) -> list[Change]:
    if was is None or now is None:
        return [Change("kernel", f"only {'with' if was else 'since'} {before if was else after}", "note")]
    if isinstance(now.facts, str):
        severity: Severity = "note" if isinstance(was.facts, str) else "severe"
        return [Change("compiling", f"does not compile: {now.facts}", severity)]
    if isinstance(was.facts, str):
        return [Change("compiling", f"compiles now; before: {was.facts}", "better")]
    return changes(was.facts, now.facts, architecture)


def _cells(facts: Facts | None, architecture: str) -> list[str]:
    if facts is None:
        return ["-"] * len(HEADINGS)
    part = occupancy(architecture, facts.blocks, facts.threads)
    return [
        str(facts.registers),
        "-" if part is None else f"{100 * part:.0f} %",
        str(facts.spills),
        f"{facts.shared:,}",
        "+".join(map(str, facts.pipeline)) or "-",
        f"{facts.load_bytes} B",
        str(facts.in_flight),
        f"{facts.loop.get('all', 0)}" if facts.loops else "-",
    ]
