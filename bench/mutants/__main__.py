"""`python -m bench.mutants`: plants faults of one line, and says which of them the tests see."""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from argparse import ArgumentParser, Namespace
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from fnmatch import fnmatch
from itertools import count
from pathlib import Path
from queue import Empty, SimpleQueue
from tempfile import TemporaryDirectory
from typing import Any

from bench.mutants.draw import Mutant, drawn
from tests.patience import patient

ROOT = Path(__file__).parents[2]
JUDGED = Path(__file__).with_name("judged.json")
AT_ONCE = (4, 12, 40, 1000)  # test files of one run after the other: the nearest are few
MOST_MEMORY = 8 * 2**20  # KiB of a process: an endless loop may not take what others need
LEFT_OUT = shutil.ignore_patterns(".git", ".venv*", ".*_cache", ".hypothesis", "__pycache__", "build", "dist")

Results = dict[str, dict[str, Any]]  # by key of the mutant


class Absent(ValueError):
    """The line of a fault is not in this checkout, or the fault does not compile."""


class Tree:
    """A private copy of a checkout: a fault is planted in it, tests run, and it is as before."""

    def __init__(self, checkout: Path, folder: Path) -> None:
        """folder: an empty one, for the copy and its caches"""
        self.root = folder / "tree"
        shutil.copytree(checkout, self.root, ignore=LEFT_OUT, symlinks=True)
        self._when = count(1_000_000_000)  # Python takes a file of the same size and time for the same file
        paths = {"PYTHONPATH": str(self.root), "TPKERNELS_CACHE_DIR": str(folder / "cache")}
        self._environment = os.environ | paths | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        if (self.root / "csrc").exists() and not list((self.root / "tpkernels").glob("*.so")):
            self._build()

    def run(
        self, tests: Sequence[str], seconds: float, hang: float, without: Sequence[str] = ()
    ) -> tuple[str, str]:
        """Return how tests ended (passed, failed, hung, crashed), also if time is over, and by which test."""
        limited = ["sh", "-c", f'ulimit -d {MOST_MEMORY}; exec "$0" "$@"', sys.executable, "-m", "pytest"]
        plain = ["-x", "-v", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist"]
        process = subprocess.Popen(
            [*limited, *plain, *[f"--deselect={test}" for test in without], *tests],
            cwd=self.root,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert process.stdout is not None
        said, end, code, is_silent = b"", time.monotonic() + seconds, 0, False
        while time.monotonic() < end and not re.search(rb"::.* (FAILED|ERROR)", said):
            if is_silent := not select.select([process.stdout], [], [], hang)[0]:
                break
            if not (more := os.read(process.stdout.fileno(), 65536)):
                code = process.wait()
                break
            said += more
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        text = said.decode(errors="replace")
        if failed := re.search(r"^(\S+?\.py::.*?) (?:FAILED|ERROR)|^ERROR (\S+)", text, re.MULTILINE):
            return "failed", failed[1] or failed[2]
        last = (re.findall(r"^(\S+?\.py::.*?) *(?: [A-Z]|$)", text, re.MULTILINE) or ["(collecting)"])[-1]
        if is_silent:
            return "hung", last
        return ("passed", "") if code in (0, 2, 5) else ("crashed", last)  # 5: all were deselected

    @contextmanager
    def with_fault(self, fault: Mutant) -> Iterator[None]:
        path = self.root / fault.file
        sound = path.read_text() if path.exists() else ""
        lines = sound.splitlines()
        like_it = [i for i, line in enumerate(lines) if line == fault.before]
        if not like_it:
            raise Absent("this checkout has no such line")
        lines[min(like_it, key=lambda i: abs(i + 1 - fault.line))] = fault.after
        is_cpp = path.suffix != ".py"
        built = [*(self.root / "tpkernels").glob("*.so")] if is_cpp else []
        kept = [library.rename(library.with_suffix(".kept")) for library in built]
        try:
            self._write(path, "\n".join(lines) + "\n")
            if is_cpp:
                self._build()
            yield
        finally:
            self._write(path, sound)
            for library, of_sound in zip(built, kept, strict=True):
                of_sound.replace(library)

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text)
        if path.suffix == ".py":
            os.utime(path, (when := next(self._when), when))

    def _build(self) -> None:
        command = ["nice", sys.executable, "setup.py", "build_ext", "--inplace", "--force"]
        environment = self._environment | {"TPKERNELS_REQUIRE_EXT": "1", "TPKERNELS_CXXFLAGS": "-O1"}
        if subprocess.run(command, cwd=self.root, env=environment, capture_output=True).returncode:
            raise Absent("it does not compile")


def nearest_tests(root: Path, fault: Mutant) -> list[str]:
    """Test files: first those that name the module, then those of its room, then those that name the room."""
    stem = Path(fault.file).stem
    named = re.compile(rf"\b{fault.room}\b.*\b{stem}\b" if fault.room != "csrc" else r"\bextension\b")

    def distance(path: Path) -> tuple[int, str]:
        text = path.read_text()
        of_room = f"tests/{fault.room}/" in str(path)
        return (0 if named.search(text) else 1 if of_room else 2 if fault.room in text else 3), str(path)

    return [str(path.relative_to(root)) for path in sorted((root / "tests").rglob("test_*.py"), key=distance)]


class Trials:
    """What the tests of one checkout say of faults."""

    def __init__(self, seconds: float = 120.0, hang: float = 150.0) -> None:
        """seconds: of tests that meet a fault; hang: of silence, after which a test hangs"""
        self._seconds, self._hang = patient(seconds), patient(hang)
        self.broken: set[str] = set()  # tests that fail without a fault

    def judge(self, tree: Tree, fault: Mutant) -> dict[str, Any]:
        """Whether tests see the fault; those that fail without it, too, are not asked again."""
        began = time.monotonic()
        result = {**asdict(fault), "room": fault.room, "result": "killed", "by": ""}
        try:
            while True:
                with tree.with_fault(fault):
                    ended, by = self._meet(tree, nearest_tests(tree.root, fault))
                if ended == "passed" or ".py" not in by or by in self.broken:
                    break
                if tree.run([by], self._seconds, self._hang)[0] == "passed":  # without the fault
                    break
                self.broken.add(by)
            result |= {"result": "survived" if ended == "passed" else "killed", "ended": ended, "by": by}
        except Absent as why:
            result |= {"result": "absent", "by": str(why)}
        return result | {"seconds": round(time.monotonic() - began, 1)}

    def _meet(self, tree: Tree, tests: Sequence[str]) -> tuple[str, str]:
        end, met = time.monotonic() + self._seconds, 0
        for files in AT_ONCE:
            left, now = end - time.monotonic(), tests[met : met + files]
            if left <= 0 or not now:
                break
            ended, by = tree.run(now, left, self._hang, sorted(self.broken.copy()))
            if ended != "passed":
                return ended, by
            met += len(now)
        return "passed", ""


def run(given: Namespace, faults: Sequence[Mutant], results: Results) -> None:
    """Try each fault, `jobs` at once, and write down what became of it as soon as it is known."""
    trials = Trials()
    waiting: SimpleQueue[Mutant] = SimpleQueue()
    for fault in faults:
        if fault.key not in results:
            waiting.put(fault)
    writing = threading.Lock()

    def work(folder: Path) -> None:
        tree = Tree(given.tree, folder)
        with suppress(Empty):
            while True:
                fault = waiting.get_nowait()
                found = trials.judge(tree, fault)
                with writing:
                    results[fault.key] = found
                    given.out.parent.mkdir(parents=True, exist_ok=True)
                    given.out.write_text(json.dumps(results, indent=1) + "\n")
                    line = f"{found['result']:9}{found['seconds']:6.0f} s  {fault.key}  {found['by']}"
                    print(line, flush=True)

    with TemporaryDirectory() as folder:
        threads = [threading.Thread(target=work, args=(Path(folder, str(i)),)) for i in range(given.jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def table(results: Results, judged: Mapping[str, str]) -> str:
    """Rooms, then survivors. Invisible: judged to be equivalent or unreachable; a share is of the others."""
    rooms: dict[str, list[str]] = defaultdict(list)
    for key, found in results.items():
        is_invisible = judged.get(key, "").startswith(("equivalent", "unreachable"))
        outcome = "invisible" if found["result"] == "survived" and is_invisible else found["result"]
        for room in (found["room"], "all"):
            rooms[room].append(outcome)
    lines = ["| room | killed | survived | equivalent or unreachable | share |", "|---|---|---|---|---|"]
    for room in sorted(rooms, key=lambda room: (room == "all", room)):
        killed, survived, invisible = map(rooms[room].count, ("killed", "survived", "invisible"))
        share = f"{killed / (killed + survived):.0%}" if killed + survived else "-"
        lines.append(f"| {room} | {killed} | {survived} | {invisible} | {share} |")
    lines += ["", "| survivor | judged |", "|---|---|"]
    for key, found in sorted(results.items()):
        if found["result"] == "survived":
            lines.append(f"| `{key.replace('|', chr(92) + '|')}` | {judged.get(key, '')} |")
    absent = [
        f"Not tried: `{key}`: {one['by']}." for key, one in results.items() if one["result"] == "absent"
    ]
    return "\n".join([*lines, "", *absent]) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(prog="python -m bench.mutants", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=140, help="faults in Python, at least 4 in each room")
    parser.add_argument("--cpp", type=int, default=12, help="faults in C++; each takes a compilation")
    parser.add_argument("--only", default="*", help="files like this, such as 'tpkernels/ops/*'")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--tree", type=Path, default=ROOT, help="try another checkout's tests and sources")
    parser.add_argument("--out", type=Path, default=ROOT / "out/mutants.json", help="results; also as .md")
    parser.add_argument("--resume", action="store_true", help="keep results, but for unjudged survivors")
    given = parser.parse_args(argv)
    faults = [one for one in drawn(ROOT, given.seed, given.count, given.cpp) if fnmatch(one.file, given.only)]
    given.tree, given.out = given.tree.resolve(), given.out.resolve()
    keys, judged = {fault.key for fault in faults}, json.loads(JUDGED.read_text())
    before: Results = json.loads(given.out.read_text()) if given.resume and given.out.exists() else {}
    results = {k: v for k, v in before.items() if k in keys and (v["result"] != "survived" or k in judged)}
    run(given, faults, results)
    told = table(results, judged)
    given.out.with_suffix(".md").write_text(told)
    print(told)
    return 0


if __name__ == "__main__":
    sys.exit(main())
