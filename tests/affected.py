"""`make affected`: runs the tests that what you changed can reach, and says why each.

Which tests a file reaches follows from imports (`tests.imports`), from who names a file that is read, not
imported, and from the tables below. Of these tests, those of the room of the file and those that few imports
part from it run, the nearest first and of equally near ones the quickest, until BUDGET is spent by what they
took in the last profile (`tests.profile`); what is left out is said, and `--all` runs it, too.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path

from tests.imports import Graph, module_of
from tests.profile import PAGE, seconds_of

ROOT = Path(__file__).parents[1]
MOST_IMPORTS = 2  # between a test of another room and a change
BUDGET = 180  # seconds of tests, of all workers

# Files that are read, not imported -> the tests and modules that read them; beside those that name the file.
READ_BY = {
    "*.md": ["tests/test_docs.py"],
    ".ci/run": ["tests/test_docs.py"],
    "csrc/*.*": ["tpkernels/extension.py", "tests/test_troubleshooting.py"],
    "csrc/cxx_flags": ["tpkernels/buckets/engine.py"],
    "docs/*.svg": ["tests/test_docs_pictures.py"],
    "docs/*.json": ["tests/test_docs_pictures.py"],
    "docs/pictures.py": ["tests/test_docs_pictures.py"],
    "docs/reference.py": ["tests/test_reference.py"],
    "docs/tables.*": ["tests/test_reference.py"],
    "docs/site.py": ["tests/test_reference.py"],
    "examples/*.py": ["tests/test_docs.py"],
    "tpkernels/dispatch/shipped/*.json": ["tpkernels/dispatch/cache.py"],
    "tests/conftest.py": ["tests/*"],  # fixtures and settings of every test
    "pyproject.toml": ["tests/*"],  # settings of pytest
    "constraints.txt": ["tests/*"],  # the versions that all run on
    "setup.py": ["tests/test_package.py"],
    "MANIFEST.in": ["tests/test_package.py"],
    "LICENSE": ["tests/test_package.py"],
    "tpkernels/py.typed": ["tests/test_package.py"],
    "tpkernels/*.pyi": ["tests/test_lazy_names.py", "tests/test_package.py"],
}
READ_BY_NONE = {
    "docs/ci-workflow.yml": "for CI alone",
    ".clang-format": "`make lint` uses it",
    ".pre-commit-config.yaml": "for pre-commit, which tests do not run",
    "csrc/tests/*": "`make asan` and `make tsan` run them",
    "bench/test_*.py": "benchmarks: `make bench` runs them",
    "bench/conftest.py": "of benchmarks: `make bench` uses it",
    "docs/record_runs.py": "records what pictures show, for minutes and as root",
}
OF_ALL_SOURCES = {  # fast tests that read sources, for files like these
    "tests/test_architecture.py": ("*.py", "reads all sources"),
    "tests/test_doctests.py": ("tpkernels/*.py", "runs the examples of all docstrings"),
    "tests/test_troubleshooting.py": ("tpkernels/*.py", "reads all sources"),
    "tests/kernels/test_atomics.py": ("tpkernels/kernels/*.py", "reads all kernels"),
    "tests/kernels/test_coverage.py": ("tpkernels/kernels/*.py", "reads all kernels"),
}
OF_THE_WHOLE_PACKAGE = {  # slow ones: with --all
    "tests/test_docs.py": ("tpkernels/*", "runs the programs on all pages"),
    "tests/test_package.py": ("tpkernels/*", "builds, installs and type-checks the package"),
    "tests/test_reference.py": ("tpkernels/*.py", "makes pages of all docstrings"),
}


@dataclass(frozen=True)
class Reached:
    """A test that a change reaches."""

    near: int  # 0: the test of that file; 1: a test of its room; 2: another
    seconds: float  # that the whole test file is likely to take
    chain: tuple[str, ...]  # files from the test to the one that was changed, each needed by the one before
    why: str = ""  # where it is not imports
    is_dear: bool = False

    @property
    def test(self) -> str:
        return self.chain[0]

    @property
    def is_far(self) -> bool:
        return self.is_dear or (self.near == 2 and len(self.chain) - 1 > MOST_IMPORTS)

    @property
    def order(self) -> tuple[int, int, float, str]:
        return self.near, len(self.chain), self.seconds, self.test

    def __lt__(self, other: Reached) -> bool:
        return self.order < other.order

    def __str__(self) -> str:
        return f"{self.test}  {self.why or ' > '.join(self.chain[1:]) or 'changed'}"


def nearness(test: str, changed: str) -> int:
    parts, tested = Path(changed).parts, Path(test)
    room = parts[1] if parts[0] in ("tpkernels", "tests") and len(parts) > 2 else None
    if test == changed:
        return 0
    if parts[0] == "csrc":
        room = "buckets"
    if room is None:
        return 0 if tested.stem == f"test_{Path(changed).stem}" else 2
    if room not in (tested.parts[1], tested.stem.removeprefix("test_")):
        return 2
    return 0 if tested.stem == f"test_{Path(changed).stem}" else 1


def tests_of(graph: Graph) -> dict[str, str]:
    """Test files -> their module."""
    return {
        str(path): name
        for name, path in graph.paths.items()
        if re.match(r"tests/(.*/)?test_\w+\.py$", str(path))
    }


def reached(graph: Graph, changed: str) -> list[Reached]:
    """The tests that a change of one file reaches, each by its shortest chain; the nearest first.

    changed: below the root
    """
    tests, module = tests_of(graph), module_of(Path(changed))
    page = graph.root / PAGE
    seconds = seconds_of(page.read_text() if page.exists() else "", tests)
    read_by = [path for pattern, paths in READ_BY.items() if fnmatch(changed, pattern) for path in paths]
    if "tests/*" in read_by:
        return sorted(
            Reached(nearness(test, changed), seconds[test], (test, changed), "as all do") for test in tests
        )
    begin = {module_of(Path(path)) for path in read_by if not nobody_reads(changed)}
    if str(graph.paths.get(module)) == changed.replace("__init__.pyi", "__init__.py"):
        begin.add(module)
    if not fnmatch(changed, "tpkernels/*.py") and not changed.endswith("__init__.py"):
        begin |= graph.readers(Path(changed)) - {__name__, "tests.test_affected"}  # which name all kinds
    before = dict.fromkeys(sorted(begin), "")
    if module in graph.packages:
        before |= dict.fromkeys(sorted(graph.users(module) - begin), module)
    waiting = list(before)
    for name in waiting:  # breadth first: the first chain that is found is a shortest one
        for other in sorted(graph.needed_by[name] - before.keys()):
            before[other] = name
            waiting.append(other)
    found = {}
    for test, name in tests.items():
        if name in before:
            chain = [test]
            while name := before[name]:
                chain.append(str(graph.paths[name]))
            shortest = tuple(dict.fromkeys([*chain, changed]))
            found[test] = Reached(nearness(test, changed), seconds[test], shortest)
    for table, is_dear in ((OF_ALL_SOURCES, False), (OF_THE_WHOLE_PACKAGE, True)):
        for test, (pattern, why) in table.items():
            if test in tests and test != changed and fnmatch(changed, pattern):
                found[test] = Reached(2 if is_dear else 1, seconds[test], (test, changed), why, is_dear)
    return sorted(found.values())


def nobody_reads(changed: str) -> str | None:
    """Why no test reaches a file."""
    return next((why for pattern, why in READ_BY_NONE.items() if fnmatch(changed, pattern)), None)


def selected(graph: Graph, changed: Iterable[str]) -> tuple[list[Reached], list[Reached]]:
    """The tests to run after a change of these files, and the others that it reaches; the nearest first.

    The nearest test of each file runs in any case.
    """
    found = [reached(graph, path) for path in changed]
    nearest = {ones[0].test for ones in found if ones}
    near: dict[str, Reached] = {}
    for ones in found:
        for one in [*(one for one in ones if not one.is_far), *ones[:1]]:
            near[one.test] = min(one, near.get(one.test, one))
    chosen, left = {}, float(BUDGET)
    for one in sorted(near.values(), key=lambda one: (one.test not in nearest, one.order)):
        if one.test in nearest or one.seconds <= left:
            chosen[one.test] = one
            left -= one.seconds
    others = {one.test: one for ones in found for one in ones if one.test not in chosen}
    return sorted(chosen.values()), sorted(others.values())


def changed_since(root: Path, base: str | None) -> list[str]:
    """Files that differ from `base`, committed or not. Without a base: from where this branch left main; on
    main, from its last commit, or from the one before if nothing has changed since."""
    uncommitted = _git(root, "status", "--porcelain", "--untracked-files=all", "--no-renames")
    if base is None and _git(root, "branch", "--show-current") == ["main"]:
        base = "HEAD" if uncommitted else "HEAD~1"
    since = base or _git(root, "merge-base", "HEAD", "main")[0]
    committed = _git(root, "diff", "--name-only", "--no-renames", since)
    return sorted({*committed, *(line[3:] for line in uncommitted)})


def _git(root: Path, *arguments: str) -> list[str]:
    ran = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    if ran.returncode:
        sys.exit(f"git {' '.join(arguments)}: {ran.stderr.strip()}; name a commit: make affected BASE=...")
    return [line for line in ran.stdout.split("\n") if line]


def main(argv: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(prog="python -m tests.affected", description="Other options go to pytest.")
    parser.add_argument("--base", help="a commit; default: where this branch left main")
    parser.add_argument("--list", action="store_true", help="say what would run, and why")
    parser.add_argument(
        "--all", action="store_true", help="also what is far from the change, or takes longer"
    )
    given, for_pytest = parser.parse_known_args(argv)
    graph = Graph(ROOT)
    changed = changed_since(ROOT, given.base)
    chosen, others = selected(graph, changed)
    if given.all:
        chosen, others = [*chosen, *others], []
    print(f"changed: {' '.join(changed) or 'nothing'}")
    for path in changed:
        if not reached(graph, path):
            gone = "it is gone" if not (ROOT / path).exists() else "nothing reads it"
            print(f"no test for {path}: {nobody_reads(path) or gone}")
    for one in chosen:
        print(one)
    if others:
        names = " ".join(one.test.removeprefix("tests/") for one in others)
        why = f"are farther away, try the whole package or exceed {BUDGET} s of tests"
        print(f"left out, of {len(others)} files that {why} (--all): {names}")
    if given.list or not chosen:
        return 0
    sys.stdout.flush()
    workers = ["-n", os.environ.get("WORKERS", "2"), "--dist", "worksteal"] if find_spec("xdist") else []
    command = [sys.executable, "-m", "pytest", *workers, *for_pytest, *(one.test for one in chosen)]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
