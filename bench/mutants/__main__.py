"""`python -m bench.mutants`: plants faults of one line, and says which of them the tests see."""

from __future__ import annotations

import sys
import threading
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path
from queue import Empty, SimpleQueue
from tempfile import TemporaryDirectory
from typing import Any

from bench.mutants.draw import Mutant, drawn
from bench.mutants.report import JUDGED, Results, read, table, write
from bench.mutants.tree import Absent, Tree
from tests.affected import reached
from tests.imports import Graph
from tests.patience import patient

ROOT = Path(__file__).parents[2]
AT_ONCE = (4, 12, 40, 1000)  # test files of one run after the other: the nearest are few


class Trials:
    """What the tests of one checkout say of faults."""

    def __init__(self, graph: Graph, given: Namespace) -> None:
        self._graph, self._given = graph, given
        self._lock = threading.Lock()
        self._sound: set[str] = set()  # tests that pass without a fault
        self._broken: set[str] = set()  # that do not

    def tests(self, fault: Mutant) -> list[str]:
        """Test files, those first that are likeliest to see it."""
        found = reached(self._graph, fault.file)
        return [one.test for one in sorted(found, key=lambda one: (bool(one.why), one.is_dear))]

    def judge(self, tree: Tree, fault: Mutant) -> dict[str, Any]:
        """Whether tests see the fault; those that fail without it, too, are not asked again."""
        began, tests = time.monotonic(), self.tests(fault)
        result = {**asdict(fault), "room": fault.room, "files": len(tests), "result": "killed"}
        try:
            while True:
                with tree.with_fault(fault):
                    found = self._meet(tree, tests)
                if found["ended"] == "passed" or self._is_sound(tree, found["by"]):
                    break
                with self._lock:
                    self._broken.add(found["by"])
            if found["ended"] == "passed":
                result["result"] = "survived"
                if fault.file.endswith(".py"):
                    with tree.with_fault(fault, reached=True):
                        result["reached"] = self._meet(tree, tests)["ended"] != "passed"
            result |= found
        except Absent as why:
            result |= {"result": "absent", "by": str(why)}
        return result | {"seconds": round(time.monotonic() - began, 1)}

    def _meet(self, tree: Tree, tests: Sequence[str]) -> dict[str, Any]:
        end, met, count = time.monotonic() + self._given.tests_of_limit, 0, 0
        found: dict[str, Any] = {"ended": "passed", "by": ""}
        for files in AT_ONCE:
            left, now = end - time.monotonic(), tests[met : met + files]
            if left > 0 and now and found["ended"] == "passed":
                with self._lock:
                    without = sorted(self._broken)
                found = tree.run(now, left, patient(self._given.hang), without)
                met, count = met + len(now), count + found["tests"]
        return found | {"tests": count, "in_time": time.monotonic() < end}

    def _is_sound(self, tree: Tree, test: str) -> bool:
        """Whether a test passes without a fault. Of a file, only its first test is run."""
        with self._lock:
            if test in self._sound:
                return True
        file = tree.root / test.partition("::")[0]
        if file.suffix == ".py" and tree.run([test], 1, patient(self._given.hang))["ended"] != "passed":
            return False
        with self._lock:
            self._sound.add(test)
        return True


def run(given: Namespace, faults: Sequence[Mutant], results: Results) -> None:
    """Try each fault, `jobs` at once, and write down what became of it as soon as it is known."""
    trials = Trials(Graph(given.tree), given)
    waiting: SimpleQueue[Mutant] = SimpleQueue()
    for fault in faults:
        if fault.key not in results:
            waiting.put(fault)
    writing = threading.Lock()

    def work(folder: Path) -> None:
        tree = Tree(given.tree, folder)
        try:
            while True:
                fault = waiting.get_nowait()
                found = trials.judge(tree, fault)
                with writing:
                    results[fault.key] = found
                    write(given.out, results)
                    print(
                        f"{found['result']:9}{found['seconds']:6.0f} s  {fault.key}  {found['by']}",
                        flush=True,
                    )
        except Empty:
            tree.close()

    with TemporaryDirectory() as folder:
        threads = [threading.Thread(target=work, args=(Path(folder, str(i)),)) for i in range(given.jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def main(argv: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(prog="python -m bench.mutants", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=140, help="faults in Python, at least 4 in each room")
    parser.add_argument(
        "--cpp", type=int, default=12, help="faults in C++, each of which takes a compilation"
    )
    parser.add_argument("--only", default="*", help="files like this, such as 'tpkernels/ops/*'")
    parser.add_argument("--first", type=int, help="no more faults than this, taken from all over the list")
    parser.add_argument(
        "--tests-of-limit", type=float, default=120, help="seconds of tests that meet a fault"
    )
    parser.add_argument("--hang", type=float, default=150, help="seconds after which a test hangs")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--tree", type=Path, default=ROOT, help="try another checkout's tests and sources")
    parser.add_argument("--out", type=Path, default=ROOT / "out/mutants.json", help="results; also as .md")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="keep results, but for survivors that nobody judged",
    )
    parser.add_argument("--list", action="store_true", help="say which faults, and try none")
    given = parser.parse_args(argv)
    faults, left_out = drawn(ROOT, given.seed, given.count, given.cpp)
    faults = [fault for fault in faults if fnmatch(fault.file, given.only)]
    if given.first:
        faults = faults[:: max(1, len(faults) // given.first)][: given.first]
    if given.list:
        print("\n".join(f"{fault.file}:{fault.line}  {fault.kind}: {fault.key}" for fault in faults))
        print("\n".join(f"left out: {number} places: {why}" for why, number in left_out.items()))
        return 0
    given.tree, given.out = given.tree.resolve(), given.out.resolve()
    drawn_now, judged = {fault.key for fault in faults}, read(JUDGED)
    before = read(given.out) if given.resume else {}
    results = {
        key: found
        for key, found in before.items()
        if key in drawn_now and (found["result"] != "survived" or key in judged)
    }
    run(given, faults, results)
    told = table(results, left_out)
    given.out.with_suffix(".md").write_text(told)
    print(told)
    return 0


if __name__ == "__main__":
    sys.exit(main())
