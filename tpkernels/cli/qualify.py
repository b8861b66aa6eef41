"""`python -m tpkernels qualify`: tests results and times on this machine's GPUs, or its CPU.

Alone it starts its ranks itself; under torchrun it uses that world. Rank 0 writes each result at once, so
that a rank that dies loses none.
"""

from __future__ import annotations

import faulthandler
import io
import json
import os
import random
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr
from dataclasses import asdict
from pathlib import Path
from signal import SIGINT, SIGTERM
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from tpkernels.cli import BadUse, add_number, require_packages, written_to

if TYPE_CHECKING:
    from tpkernels.cli.qualify_world import Qualification, QualifyWorld

SECONDS = 120.0
CPU_RANKS = 2
PROGRESS = "TPKERNELS_QUALIFY_PROGRESS"  # a file, from the process that starts ranks to rank 0


def add_options(parser: ArgumentParser, words: Sequence[str]) -> None:
    parser.add_argument("--json", type=written_to, metavar="FILE", help="also write the report into FILE")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, metavar="S", help=f"about how long ({SECONDS:g})"
    )
    add_number(parser, "--seed", "of shapes and numbers, to see a run again")
    parser.add_argument("--quick", action="store_true", help="a little of each: shows that the command works")


def main(options: Namespace) -> int:
    if not 0 < options.seconds < 86400:
        raise BadUse(f"expected --seconds between 0 and a day, got {options.seconds:g}")
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(2**31)
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # before a kernel is imported; ranks inherit it
    require_packages("triton")
    return _as_rank(options) if "RANK" in os.environ else _alone(options)


def _alone(options: Namespace) -> int:
    """Start ranks, print their findings, and return the exit code."""
    import torch

    from tpkernels.training.launch import run_ranks

    ranks = torch.cuda.device_count() or CPU_RANKS
    command = [sys.executable, "-m", "tpkernels", "qualify", "--seed", str(options.seed)]
    command += ["--seconds", str(options.seconds), *["--quick"] * options.quick]
    with TemporaryDirectory() as folder:
        progress = Path(folder) / "progress"
        progress.touch()
        os.environ[PROGRESS] = str(progress)
        try:
            with redirect_stderr(io.StringIO()) as told:  # of this process only: ranks keep the real one
                code = run_ranks(command, ranks)
        finally:
            del os.environ[PROGRESS]
        lines = [json.loads(line) for line in progress.read_text(encoding="utf-8").splitlines()]
    if code in (128 + SIGINT, 128 + SIGTERM):  # nothing has failed
        print("interrupted", file=sys.stderr)
        return code
    return _finish(_report(options, ranks, lines, code, told.getvalue()), options)


def _report(
    options: Namespace, ranks: int, lines: list[dict[str, Any]], code: int, told: str
) -> Qualification:
    """Return the report of rank 0's lines, and of the ranks' exit code."""
    from tpkernels.cli.qualify_world import Check, Qualification, versions_here

    checks = [Check(**line["check"]) for line in lines if "check" in line]
    auto = next((line["auto"] for line in lines if "auto" in line), "auto: not known, ranks ended before")
    if code:
        during = [line["begins"] for line in lines if "begins" in line][-1:] or ["the start"]
        how = told.strip() or f"the ranks ended with exit code {code}"
        checks.append(Check("ranks", f"{ranks} ranks", "wrong", f"{how}, during {during[0]}"))
    return Qualification(versions_here(), ranks, options.seed, checks, auto)


def _as_rank(options: Namespace) -> int:
    """Test this machine as one rank of a running world; return the exit code."""
    import torch
    import torch.distributed as dist

    from tpkernels.cli.qualify_world import QualifyWorld
    from tpkernels.training.launch import device_of_rank, hold_lifeline

    hold_lifeline()
    assert sys.__stderr__ is not None, "a rank has its launcher's stderr"
    longest = 3 * options.seconds + 180  # ends a rank that hangs
    faulthandler.dump_traceback_later(longest, exit=True, file=sys.__stderr__)
    try:
        torch.set_num_threads(1)
        world = QualifyWorld.join(device_of_rank(), options.seed, options.seconds, options.quick)
        options.seed = world.seed
        lines = []
        for line in _lines(world):
            lines.append(line)
            _write(line)
        dist.barrier()
        dist.destroy_process_group()
    finally:
        faulthandler.cancel_dump_traceback_later()
    if PROGRESS in os.environ:
        return 0  # the process that started this rank has read the findings
    report = _report(options, world.ranks, lines, 0, "")
    return _finish(report, options) if world.rank == 0 else 0 if report.right else 1


def _lines(world: QualifyWorld) -> Iterator[dict[str, Any]]:
    """Yield the name of each part, its results, and at last the choice of `auto`."""
    from tpkernels.cli.qualify_calls import check_graphs, check_transports
    from tpkernels.cli.qualify_checks import (
        auto_line,
        check_buckets,
        check_kernels,
        check_times,
    )

    parts = {
        "kernels": check_kernels,
        "transports": check_transports,
        "graphs": check_graphs,
        "times": check_times,
        "buckets": check_buckets,
    }
    times: dict[str, float] = {}
    for name, checks in parts.items():
        yield {"begins": name}
        for check in checks(world):
            yield {"check": asdict(check)}
            if check.part == "times":
                times = check.numbers
    yield {"begins": "auto"}
    yield {"auto": auto_line(world, times)}


def _write(line: dict[str, Any]) -> None:
    if PROGRESS in os.environ and os.environ["RANK"] == "0":
        with open(os.environ[PROGRESS], "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _finish(report: Qualification, options: Namespace) -> int:
    """Print the report and keep it; return the exit code."""
    from tpkernels.cli.qualify_world import save_report

    versions = report.versions
    print(f"{versions.gpu}, torch {versions.torch}, triton {versions.triton}")
    print(f"{report.ranks} ranks, --seed {report.seed}")
    print(report.table())
    print(report.auto)
    wrong = [f"{check.part} {check.name}" for check in report.checks if check.status == "wrong"]
    print("qualified" if report.right else f"not qualified: {', '.join(wrong) or 'nothing was tried'}")
    try:
        if options.json is not None:
            from tpkernels.files import replace_text

            replace_text(options.json, report.as_json())
        if not options.quick:  # a quick run does not qualify a GPU
            save_report(report)
    except OSError as error:
        print(f"the report could not be written: {error}", file=sys.stderr)
        return 1
    return 0 if report.right else 1
