"""`python -m bench gpu`: all that is to be done on a machine with a GPU, in stages with limits.

The first stages take less than ten minutes together, and answer most: `--quick` runs no more. Within them
kernels are compiled, then compared with float64, then timed, so that nothing is timed next to something else.
The others follow: all tests, `qualify`, the benchmarks and their gate. A stage can be run again alone.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from bench.results import BadFile, read, slug
from bench.stages import GRACE, CannotRun, Command, Stage, run_stages
from tpkernels.cli import BadUse

ROOT = Path(__file__).parents[1]
BEFORE = ROOT / "bench" / "results"  # runs on other days, by the names of their devices
JOBS = 12  # processes at once, where nothing is timed: compiling and importing take one core each
KERNELS, OTHERS = "kernels", ("ops", "dispatch", "comm")  # rooms of tests
NO_TESTS = 5  # pytest's exit code for a file that is skipped as a whole
# virtual ranks on one GPU: tests of flags and rows, by what `pytest -k` takes
ORDER_TESTS = "tests/ops/test_on_gpu.py"
ORDER = {
    "eager": "virtual_ranks or stores_into",
    "captured": "captured_call",
    "late": "never_come",
    "delayed": "1000_delayed",
}
SANITIZED_CASES = "ragged and bf16"  # each access is checked, which takes long
SANITIZED = ("tests/kernels/test_product_launchers.py", "tests/kernels/test_wgrad.py")


def add_options(parser: ArgumentParser, words: Sequence[str]) -> None:
    parser.add_argument("--quick", action="store_true", help="only what takes less than ten minutes")
    parser.add_argument("--stages", metavar="LIST", help="these only, such as build,launchers; else all")
    parser.add_argument("--resume", action="store_true", help="leave out what passed before")
    parser.add_argument("--dry-run", action="store_true", help="print commands and limits, and run nothing")
    rehearse = "the quick stages on a CPU that stands in for a GPU: a little of each"
    parser.add_argument("--rehearse", action="store_true", help=rehearse)
    parser.add_argument("--jobs", type=int, default=JOBS, metavar="N", help=f"processes at once ({JOBS})")
    out = Path(os.environ.get("OUT") or "out/gpu")
    parser.add_argument("--out", type=Path, default=out, metavar="FOLDER", help="for what is found")


def main(options: Namespace) -> int:
    command = shlex.join(["python", "-m", "bench", "gpu", *options.words])
    stages = quick_stages(options.out, command, options.jobs, rehearse=options.rehearse)
    if not (options.quick or options.rehearse):
        stages += long_stages(options.out, options.jobs)
    if options.stages is not None:
        known = {stage.name: stage for stage in stages}
        names = options.stages.split(",")
        if unknown := [name for name in names if name not in known]:
            raise BadUse(f"expected --stages of {', '.join(known)}; got {', '.join(map(repr, unknown))}")
        stages = [stage for stage in stages if stage.name in names]
    if options.dry_run:
        print("\n".join(plan(stages)))
        return 0
    if not options.rehearse and (why := no_gpu()):
        raise BadUse(f"{why}; --dry-run shows what would be done, --rehearse does a little of it on a CPU")
    if Path.cwd() != ROOT:
        raise BadUse(f"expected to be called in {ROOT}, where `python setup.py` and the tests are")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # processes share the cores
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    outcomes = run_stages(stages, options.out, resume=options.resume)
    return 0 if all(status in ("passed", "skipped") for status in outcomes.values()) else 1


def no_gpu() -> str | None:
    import torch

    return None if torch.cuda.is_available() else "a CUDA device is needed, and there is none"


def plan(stages: Sequence[Stage]) -> list[str]:
    lines = []
    for stage in stages:
        lines.append(f"{stage.name}: at most {stage.limit:.0f} s, {stage.jobs} at once")
        try:
            lines += [f"  {shlex.join(command)}" for command in stage.commands().values()]
        except CannotRun as why:
            lines.append(f"  left out now: {why}")
    lines.append(f"in all at most {sum(stage.limit + 2 * GRACE for stage in stages):.0f} s")
    return lines


def program(out: Path, stage: str, *words: str, rehearse: bool = False) -> Command:
    rehearsed = ["--rehearse"] * rehearse
    return [sys.executable, "-m", "bench.quick_stages", *rehearsed, "--out", str(out), stage, *words]


def quick_stages(out: Path, command: str, jobs: int, *, rehearse: bool = False) -> list[Stage]:
    """In their order. command: that was given, for the record"""

    def parts(stage: str, *names: str) -> Mapping[str, Command]:
        return {name: program(out, stage, name, rehearse=rehearse) for name in names}

    def alone(stage: str) -> Mapping[str, Command]:
        return {stage: program(out, stage, rehearse=rehearse)}

    def build() -> Mapping[str, Command]:
        extension = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        if rehearse:  # that it is asked for rightly
            extension.append("--help")
        return {"kernels": program(out, "build", command, rehearse=rehearse), "extension": extension}

    def launchers() -> Mapping[str, Command]:
        from bench.quick_stages import REHEARSED_LAUNCHERS, launcher_names

        return parts("launchers", *(REHEARSED_LAUNCHERS if rehearse else launcher_names()))

    def order() -> Mapping[str, Command]:
        return {name: program(out, "order", ORDER_TESTS, "-k", tests) for name, tests in ORDER.items()}

    return [
        Stage("build", 40, build, jobs=2),
        Stage("launchers", 75, launchers, jobs),
        Stage("order", 40, order, jobs=len(ORDER)),
        Stage("reserved_sms", 45, lambda: alone("reserved_sms")),
        Stage("products", 150, lambda: parts("products", "8", "1", "ops")),
        Stage("overlap", 40, lambda: alone("overlap")),
        Stage("host_time", 30, lambda: alone("host_time")),
        Stage("registers", 30, lambda: parts("registers", "compiled", "ncu")),
    ]


def long_stages(out: Path, jobs: int) -> list[Stage]:
    """What follows, in its order. out: each writes its files there"""
    python = sys.executable
    bench = (python, "-m", "bench")
    results = out / "bench.json"

    def tests(stage: str, files: Sequence[str]) -> Mapping[str, Command]:
        return {file: program(out, stage, file) for file in files}

    def sanitizer() -> Mapping[str, Command]:
        tool = shutil.which("compute-sanitizer")
        if tool is None:
            raise CannotRun("compute-sanitizer is not on the PATH; it comes with the CUDA toolkit")
        checked = (tool, "--tool", "memcheck", "--error-exitcode", "1", "--target-processes", "all")
        pytest = (python, "-m", "pytest", "-q", "-k", SANITIZED_CASES)
        return {file: [*checked, *pytest, file] for file in SANITIZED}

    def qualify() -> Mapping[str, Command]:
        words = ("--seconds", "60", "--json", str(out / "qualify.json"))
        return {"qualify": [python, "-m", "tpkernels", "qualify", *words]}

    def benchmarks() -> Mapping[str, Command]:
        if find_spec("pytest_benchmark") is None:
            raise CannotRun("pytest-benchmark is not installed")
        # candidates that were not timed yet are timed where a case comes to them
        return {"run": [*bench, "run", "--gpu-set", "--seconds", "150", "-o", str(results)]}

    def gate() -> Mapping[str, Command]:
        before = BEFORE / f"{slug(device_of(results))}.json"
        if not before.exists():
            raise CannotRun(f"there is no run to compare with: {results} belongs into {before}")
        words = ("--json", str(out / "gate.json"), "--times", str(before), str(results))
        return {"gate": [*bench, "gate", *words]}

    fine = frozenset({0, NO_TESTS})
    return [
        Stage("kernels", 400, lambda: tests("kernels", kernel_tests()), jobs, fine),
        Stage("tests", 290, lambda: tests("tests", other_tests()), jobs, fine),
        Stage("sanitizer", 60, sanitizer, jobs=len(SANITIZED)),
        Stage("qualify", 150, qualify),
        Stage("bench", 210, benchmarks),
        Stage("gate", 120, gate),
    ]


def kernel_tests() -> list[str]:
    return [str(path) for path in _test_files() if path.parent.name == KERNELS]


def other_tests() -> list[str]:
    """The files of other rooms that compute on a GPU, and any with a test that needs one."""
    others = [path for path in _test_files() if path.parent.name != KERNELS]
    return [str(path) for path in others if path.parent.name in OTHERS or _needs_gpu(path)]


def _test_files() -> list[Path]:
    """Below ROOT, but for the tests of this module."""
    found = sorted(path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py"))
    return [path for path in found if path.name != "test_gpu_target.py"]


def _needs_gpu(path: Path) -> bool:
    return "pytest.mark.gpu" in (ROOT / path).read_text(encoding="utf-8")


def device_of(results: Path) -> str:
    try:
        return read(results).device
    except BadFile as error:
        raise CannotRun(f"there are no results yet: {error}") from error
