"""`python -m bench gpu`: all that is to be done on a machine with a GPU, in stages with limits.

Tests come before `qualify`, that before tuning, tuning before benchmarks, so that nothing is timed next to
something else. Kernels come first and alone: on wrong ones nothing else is worth trying, and compiling them
takes most of the time. A stage can be run again alone, and one that fails does not lose the others.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from bench.baseline import path_for
from bench.results import BadFile, read, slug
from bench.shapes import GPU_SET, sizes_of
from bench.stages import CannotRun, Command, Stage, run_stages
from tpkernels.cli import BadUse

ROOT = Path(__file__).parents[1]
JOBS = 8  # test files at once: compiling kernels is most of their work, and takes one core each
KERNELS, OTHERS = "kernels", ("ops", "dispatch", "comm")  # rooms of tests
CALL = 590  # seconds: machines are lent for 600 at a time, and to end what hangs takes some
NO_TESTS = 5  # pytest's exit code for a file that is skipped as a whole
SANITIZED_CASES = "ragged and bf16"  # each access is checked, which takes long
SANITIZED = ("tests/kernels/test_product_launchers.py", "tests/kernels/test_wgrad.py")


def add_options(parser: ArgumentParser, words: Sequence[str]) -> None:
    parser.add_argument("--stages", metavar="LIST", help="these only, such as kernels,tune; else all")
    parser.add_argument("--resume", action="store_true", help="leave out what passed before")
    parser.add_argument("--dry-run", action="store_true", help="print commands and limits, and run nothing")
    parser.add_argument("--jobs", type=int, default=JOBS, metavar="N", help=f"test files at once ({JOBS})")
    parser.add_argument(
        "--out", type=Path, default=Path("out/gpu"), metavar="FOLDER", help="for what is found"
    )


def main(options: Namespace) -> int:
    stages = stages_of(options.out, options.jobs)
    if options.stages is not None:
        known = {stage.name: stage for stage in stages}
        names = options.stages.split(",")
        if unknown := [name for name in names if name not in known]:
            raise BadUse(f"expected --stages of {', '.join(known)}; got {', '.join(map(repr, unknown))}")
        stages = [stage for stage in stages if stage.name in names]
    if options.dry_run:
        print("\n".join(plan(stages)))
        return 0
    if why := no_gpu():
        raise BadUse(f"{why}; --dry-run shows what would be done")
    if Path.cwd() != ROOT:
        raise BadUse(f"expected to be called in {ROOT}, where `python setup.py` and the tests are")
    outcomes = run_stages(stages, options.out, resume=options.resume)
    return 0 if all(outcome.status in ("passed", "skipped") for outcome in outcomes.values()) else 1


def no_gpu() -> str | None:
    import torch

    return None if torch.cuda.is_available() else "a CUDA device is needed, and there is none"


def plan(stages: Sequence[Stage]) -> list[str]:
    lines = []
    for stage in stages:
        lines.append(f"{stage.name}: at most {stage.limit:.0f} s, {stage.jobs} at once")
        try:
            lines += [f"  {shlex.join(command)}" for command in stage.commands()]
        except CannotRun as why:
            lines.append(f"  left out now: {why}")
    lines.append(f"in all at most {sum(stage.limit for stage in stages):.0f} s")
    for call in calls(stages):
        names = ",".join(stage.name for stage in call)
        lines.append(f"in a call of its own: STAGES={names}, at most {sum(s.limit for s in call):.0f} s")
    return lines


def calls(stages: Sequence[Stage]) -> list[list[Stage]]:
    """The stages in their order, in as few calls as CALL allows."""
    packed: list[list[Stage]] = []
    for stage in stages:
        if not packed or sum(one.limit for one in packed[-1]) + stage.limit > CALL:
            packed.append([])
        packed[-1].append(stage)
    return packed


def stages_of(out: Path, jobs: int) -> list[Stage]:
    """In their order. out: each stage writes into a folder of its name there"""
    python = sys.executable
    bench = (python, "-m", "bench")
    results = out / "bench" / "bench.json"

    def build() -> list[Command]:
        return [[python, "setup.py", "-q", "build_ext", "--inplace"]]

    def tests(stage: str, files: Sequence[str]) -> list[Command]:
        def report(file: str) -> str:
            return str(out / stage / Path(file).with_suffix(".xml"))

        return [[python, "-m", "pytest", "-q", f"--junitxml={report(file)}", file] for file in files]

    def sanitizer() -> list[Command]:
        tool = shutil.which("compute-sanitizer")
        if tool is None:
            raise CannotRun("compute-sanitizer is not on the PATH; it comes with the CUDA toolkit")
        checked = (tool, "--tool", "memcheck", "--error-exitcode", "1", "--target-processes", "all")
        return [[*checked, python, "-m", "pytest", "-q", "-k", SANITIZED_CASES, file] for file in SANITIZED]

    def qualify() -> list[Command]:
        file = str(out / "qualify" / "qualify.json")
        return [[python, "-m", "tpkernels", "qualify", "--seconds", "120", "--json", file]]

    def tune() -> list[Command]:
        file = str(out / "tune" / "tune.json")
        # what is left then, benchmarks choose for themselves where they come to it
        few = ("--no-bias", "--seconds", "180", "--json", file)
        return [[python, "-m", "tpkernels", "tune", "--shapes", sizes_of(GPU_SET), *few]]

    def benchmarks() -> list[Command]:
        return [
            [*bench, "run", "--gpu-set", "--seconds", "95", "-o", str(results)],
            [python, "-m", "bench.cases.overlap", "--json", str(out / "bench" / "overlap.json")],
        ]

    def gate() -> list[Command]:
        device = device_of(results)
        if path_for(device).exists():
            report = str(out / "gate" / "gate.json")
            return [[*bench, "gate", "--skip", "kernels", "--repeat", "2", "--json", report, str(results)]]
        first = str(out / "gate" / f"{slug(device)}.json")  # to be looked at, and put into bench/baselines
        return [[*bench, "gate", "--update", "--baseline", first, str(results)]]

    def report() -> list[Command]:
        device_of(results)
        return [[*bench, "report", str(results), "-o", str(out / "report" / "index.html")]]

    fine = frozenset({0, NO_TESTS})
    return [
        Stage("build", 75, build),
        Stage("kernels", 500, lambda: tests("kernels", kernel_tests()), jobs, fine),
        Stage("tests", 290, lambda: tests("tests", other_tests()), jobs, fine),
        Stage("sanitizer", 60, sanitizer, jobs=len(SANITIZED)),
        Stage("qualify", 240, qualify),
        Stage("tune", 210, tune),
        Stage("bench", 210, benchmarks),
        Stage("gate", 90, gate),
        Stage("report", 30, report),
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
