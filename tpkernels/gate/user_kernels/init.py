"""`check --init`: a gate.toml for the kernels of a folder or package, from the launches that a script makes.

A launch says all that a table needs: types, constants, shapes, the grid. Only the truth is missing. Until
there is an oracle, the results of today's kernel take its place (`oracle = "recorded"`), and today's merits
become rules. What cannot be guarded stands in the file as well, with the reason.
"""

from __future__ import annotations

import ast
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tpkernels.gate.ahead_of_time import CompileJob, Facts, compile_all
from tpkernels.gate.rules import violations
from tpkernels.gate.user_kernels import children
from tpkernels.gate.user_kernels.config import RECORDING, Config, inspect_kernels
from tpkernels.gate.user_kernels.entries import entry_of
from tpkernels.gate.user_kernels.record import ConfigError, OwnKernel
from tpkernels.gate.user_kernels.recorded import RECORDED
from tpkernels.gate.user_kernels.table import own_kernel

PROCESSES = 2
COMPUTING = "tpkernels.gate.user_kernels.numerics"
# rules that a kernel may keep from now on, if today's code does
WORTH_KEEPING = (
    *("no_spills", "vector_loads", "vector_stores", "async_loads", "tensor_cores", "wgmma"),
    *("wide_offsets", "wide_sums"),
)
TOLERANCE_FP8 = 0.02  # of results in fp8: some elements may round to the next number
WORKFLOW = Path(".github/workflows/kernels.yml")


class InitError(ValueError):
    """Why there is nothing to write, and what to do."""


@dataclass(frozen=True)
class Found:
    """A kernel in the sources."""

    name: str
    place: str  # "norm.py:12"
    host: str  # who launches it: "by norm()"


@dataclass
class Guarded:
    """A launch on its way into gate.toml."""

    name: str
    place: str
    table: dict[str, Any]
    why_not: str = ""  # why it is no table yet
    notes: list[str] = field(default_factory=list)


def folder_of(named: str) -> Path:
    """The folder with the sources of a folder or an importable package."""
    if Path(named).is_dir():
        return Path(named).resolve()
    try:
        spec = find_spec(named)
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.origin:
        raise InitError(f"{named!r} is no folder, and no package that can be imported")
    return Path(spec.origin).resolve().parent if spec.submodule_search_locations else Path(spec.origin)


def kernels_of(folder: Path) -> list[Found]:
    """Kernels in these sources, which are not imported: under `triton.jit`, and called by no other."""
    paths = [folder] if folder.is_file() else sorted(folder.rglob("*.py"))
    defined: dict[str, str] = {}
    hosts: dict[str, str] = {}
    helpers: set[str] = set()
    for path in paths:
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError, OSError):
            continue
        where = path.relative_to(folder if folder.is_dir() else folder.parent)
        for function in ast.walk(tree):
            if not isinstance(function, ast.FunctionDef):
                continue
            is_kernel = any(re.search(r"\bjit\b", ast.unparse(one)) for one in function.decorator_list)
            if is_kernel:
                defined.setdefault(function.name, f"{where}:{function.lineno}")
            for call in ast.walk(function):
                match call:
                    case ast.Call(func=ast.Subscript(value=ast.Name(id=name))):
                        hosts.setdefault(name, f"by {function.name}()")
                    case ast.Call(func=ast.Name(id=name)) if is_kernel:
                        helpers.add(name)
    names = [name for name in defined if name in hosts or name not in helpers]
    return [Found(name, defined[name], hosts.get(name, "by no function here")) for name in names]


def recorded_launches(folder: Path, home: Path, run: str) -> children.Answer:
    """What `recording.answered` says of a command, of kernels in these sources alone."""
    (answer,) = children.answers(RECORDING, home, [{"run": run}])
    if isinstance(answer, str):
        raise InitError(f"{run!r} {answer}")
    mine = [one for one in answer["launches"] if Path(one["file"]).resolve().is_relative_to(folder)]
    return {**answer, "launches": mine}


def guarded(launches: Iterable[Mapping[str, Any]]) -> list[Guarded]:
    """Launches with names for their tables: the kernel's, with its module's where two share it."""
    launches = list(launches)
    kernels = {one["kernel"] for one in launches}
    names: dict[str, int] = {}
    found = []
    for one in launches:
        module, function = one["kernel"].split(":")
        shared = sum(other.endswith(f":{function}") for other in kernels) > 1
        name = f"{module.rsplit('.', 1)[-1]}.{function}" if shared else function
        name = name.lstrip("_") or name
        names[name] = names.get(name, 0) + 1
        number = f"/{names[name]}" if names[name] > 1 else ""
        table = {"kernel": one["kernel"], **{key: value for key, value in one["table"].items() if value}}
        guard = Guarded(name + number, "", table)
        if "<locals>" in function:
            guard.why_not = "it is defined inside a function"
        elif module == "__main__":
            guard.why_not = "it is defined in the script itself: move it to a module"
        found.append(guard)
    return found


def complete(guards: list[Guarded], home: Path, prepare: str, report: Callable[[object], None]) -> None:
    """Fill in outputs and rules, or why a kernel cannot be guarded."""
    config = Config(home / "gate.toml", home / "gate-budgets.json", ())
    owns: dict[str, tuple[Guarded, OwnKernel]] = {}
    for guard in guards:
        if not guard.why_not:
            try:
                table = {key: value for key, value in guard.table.items() if key != "fill"}
                owns[guard.name] = guard, own_kernel(guard.name, table)
            except ConfigError as error:
                guard.why_not = str(error)
    entries = {}
    for own, kernel in inspect_kernels([own for _, own in owns.values()], config.folder):
        guard = owns[own.name][0]
        try:
            if isinstance(kernel, ConfigError):
                raise kernel
            entries[own.name] = entry_of(replace(own, rules=()), kernel, config.folder)
            guard.place = kernel.place
        except ConfigError as error:
            guard.why_not = str(error)
    jobs = [CompileJob(entry, "sm_90") for entry in entries.values()]
    for job, facts in zip(jobs, compile_all(jobs, PROCESSES, report), strict=True):
        guard = owns[job.entry.name][0]
        if isinstance(facts, Facts):
            guard.table["rules"] = [
                rule for rule in WORTH_KEEPING if not [*violations([rule], job.architecture, facts)]
            ]
        else:
            guard.why_not = f"does not compile: {facts}"
    todo = [guard for guard in guards if not guard.why_not]
    for guard, answer in zip(todo, _interpreted(todo, config.folder, prepare), strict=True):
        _take_results(guard, answer)
        report(guard.name)


def _interpreted(todo: list[Guarded], folder: Path | None, prepare: str) -> Iterator[children.Answer | str]:
    """How each kernel uses its tensors, all of them filled as inputs are."""
    items = []
    for guard in todo:
        pointers = [*guard.table["shapes"]] if "shapes" in guard.table else []
        fill = {name: guard.table.get("fill", {}).get(name, "normal") for name in pointers}
        table = {**guard.table, "oracle": RECORDED, "outputs": pointers[:1], "fill": fill, "tolerance": ANY}
        items.append({"name": guard.name, "table": table, "sizes": 0, "recorded": None, "prepare": prepare})
    variables = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    return children.answers(COMPUTING, folder, items, variables)


ANY = {"fp8e4nv": 0.5, "fp8e5": 0.5}
STRAYED = ("read outside", "written outside")  # what a kernel does already


def _take_results(guard: Guarded, answer: children.Answer | str) -> None:
    """Have results recorded, where the interpreter can compute them."""
    table, fill = guard.table, guard.table.pop("fill", {})
    told = {"failure": answer} if isinstance(answer, str) else answer
    uses = {tuple(use) for use in told.get("uses", ())}
    outputs = [name for name in table.get("shapes", {}) if ("written", name) in uses]
    if not outputs:
        why = "it writes no tensor" if uses else told.get("mistake") or told["failure"]
        guard.notes.append(f"compiled only: {why}")
        return
    guard.notes += [one for one in told["failure"].split("; ") if one.startswith(STRAYED)]
    table |= {"oracle": RECORDED, "outputs": outputs}
    kept = {
        name: fill.get(name, "normal")
        for name in table["shapes"]
        if (name in fill and name not in outputs) or (name in outputs and ("read", name) in uses)
    }
    if kept:
        table["fill"] = kept
    narrow = {table["signature"][name].removeprefix("*") for name in outputs} & {*ANY}
    if narrow:
        table["tolerance"] = dict.fromkeys(sorted(narrow), TOLERANCE_FP8)


def toml_of(guards: Iterable[Guarded], missing: Iterable[Found], run: str) -> str:
    """The text of gate.toml; what cannot be guarded is commented out, with the reason."""
    parts = [
        f"# Kernels as {json.dumps(run)} launches them: {PAGE}\n"
        '# oracle = "recorded" compares with the results of the last --update. Better: "oracles:softmax", a '
        "function of\n# the kernel's tensors in float64.\n"
        f'budgets = "gate-budgets.json"\nrun = {json.dumps(run)}\n'
    ]
    for guard in guards:
        lines = [f"[kernels.{_key(guard.name)}]"]
        lines += [f"{key} = {_toml(value)}" for key, value in guard.table.items()]
        mark = "# " if guard.why_not else ""
        notes = [f"# {note}" for note in ([f"left out: {guard.why_not}"] if guard.why_not else guard.notes)]
        parts.append("\n".join([*notes, *(mark + line for line in lines)]) + "\n")
    lines = [f"# {one.place}: {one.name}, {one.host}" for one in missing]
    if lines:
        parts.append("\n".join(["# Not launched, so not guarded:", *lines]) + "\n")
    return "\n".join(parts)


PAGE = "docs/guard-your-kernels.md of tpkernels"


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{_key(name)} = {_toml(one)}' for name, one in value.items())} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, bool | str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return repr(value)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[\w-]+", name, re.ASCII) else json.dumps(name)


def workflow(home: Path) -> str:
    """A GitHub workflow that checks with the torch, Triton and tpkernels of this machine."""
    pins = {name: metadata.version(name).split("+")[0] for name in ("torch", "triton", "numpy")}
    own = any((home / name).exists() for name in ("pyproject.toml", "setup.py"))
    install = "      - run: python -m pip install .\n" if own else ""
    return WORKFLOW_TEXT.format(library=_library(), install=install, **pins)


def _library() -> str:
    """What the workflow installs: the commit that this package was installed from, or its version."""
    try:
        found = json.loads(metadata.distribution("tpkernels").read_text("direct_url.json") or "{}")
        commit = found.get("vcs_info", {}).get("commit_id", "")
    except (metadata.PackageNotFoundError, ValueError):
        found, commit = {}, ""
    if commit:
        return f"tpkernels @ git+{found['url']}@{commit}"
    from tpkernels import __version__

    return f"tpkernels @ git+https://github.com/${{{{ github.repository_owner }}}}/tpkernels@v{__version__}"


WORKFLOW_TEXT = """\
# Written by `python -m tpkernels check --init`: checks kernels on every push, without a GPU. Its versions are
# those that wrote the budgets: change them together.
name: kernels

on:
  push:
  pull_request:

env:
  # tpkernels is on no package index: a fork of it, another URL, or a wheel in this repository
  LIBRARY: "{library}"

jobs:
  check:
    runs-on: ubuntu-latest
    timeout-minutes: 20
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with:
          python-version: "3.12"
      # torch first, or pip takes the one with gigabytes of CUDA libraries
      - run: python -m pip install torch=={torch} --index-url https://download.pytorch.org/whl/cpu
      - run: python -m pip install triton=={triton} numpy=={numpy} "$LIBRARY"
{install}      - uses: actions/cache@v4 # what has not changed is not compiled again
        with:
          path: ~/.cache/tpkernels
          key: tpkernels-${{{{ hashFiles('**/*.py', 'gate.toml') }}}}
          restore-keys: tpkernels-
      - run: python -m tpkernels check --config gate.toml --json check.json
      - uses: actions/upload-artifact@v4
        if: always()
        with:
          name: check
          path: check.json
"""


def write(named: str, run: str | None, config: Path, prepare: str, report: Callable[[object], None]) -> str:
    """Write gate.toml and the workflow; returns what is to be read on one screen."""
    if config.exists():
        raise InitError(f"{config} exists: --init writes a new one only")
    home, folder = config.absolute().parent, folder_of(named)
    kernels = kernels_of(folder)
    if not kernels:
        raise InitError(f"there is no kernel under triton.jit in {folder}")
    if run is None:
        raise InitError(_asked(kernels, named))
    answer = recorded_launches(folder, home, run)
    guards = guarded(answer["launches"])
    ended = f"{run!r} ended with {answer['ended']}" if answer["ended"] else ""
    if not guards:
        raise InitError(f"{run!r} launches no kernel of {folder}{f', and {ended}' * bool(ended)}")
    complete(guards, home, prepare, report)
    seen = {guard.table["kernel"].split(":")[1] for guard in guards} | {
        kernel.split(":")[1] for kernel in answer["unsaid"]
    }
    missing = [one for one in kernels if one.name not in seen]
    config.write_text(toml_of(guards, missing, run), encoding="utf-8")
    if not (path := home / WORKFLOW).exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(workflow(home), encoding="utf-8")
    return "\n".join(_told(config, guards, missing, answer["unsaid"], ended))


def _asked(kernels: list[Found], named: str) -> str:
    lines = [f"  {one.name} ({one.place}), {one.host}" for one in kernels[:SHOWN]]
    more = [f"  and {len(kernels) - SHOWN} more"] if len(kernels) > SHOWN else []
    return "\n".join(
        [
            f"{named} has {len(kernels)} kernels:",
            *lines,
            *more,
            "Say by --run what launches them: a script, or a module with arguments, such as your tests:",
            f"  python -m tpkernels check --init {named} --run launches.py",
            f'  python -m tpkernels check --init {named} --run "pytest tests/test_norm.py"',
            "No GPU: launches are noted, not made. Two sizes tell most: whole tiles, and ragged ones.",
        ]
    )


SHOWN = 12


def _told(
    config: Path, guards: list[Guarded], missing: list[Found], unsaid: Mapping[str, str], ended: str
) -> Iterator[str]:
    for guard in guards:
        state = f"left out: {guard.why_not}" if guard.why_not else "; ".join(guard.notes)
        rules = ", ".join(guard.table.get("rules", ()))
        yield f"{guard.place or guard.table['kernel']}: {guard.name}: {state or f'guarded: {rules}'}"
    for kernel, reason in unsaid.items():
        yield f"{kernel}: left out: {reason}, which no table can say"
    if ended:
        yield f"note: {ended}; the launches before count"
    if missing:
        yield f"note: {len(missing)} kernels are not launched, see the end of {config.name}"
    ragged = {guard.table["kernel"] for guard in guards if "/" in guard.name}
    if whole := sorted(
        {guard.table["kernel"].split(":")[1] for guard in guards if guard.table["kernel"] not in ragged}
    ):
        yield f"note: launched at one alignment only, so a lost mask may not show: {', '.join(whole)}"
    yield f"{os.path.relpath(config)} and {WORKFLOW} are written"
