"""`python -m tpkernels check`: checks without a GPU whether kernels are still right and fast.

It compiles every kernel that is registered, checks the result against rules and budgets, then computes in
Triton's interpreter against float64. Exit code 1 means a regression. The kernels are ours, or with --config
a user's.
"""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from tpkernels import __version__
from tpkernels.cli import SAID_EVERY, BadUse, Progress, bad_use_if, require_packages, written_to

if TYPE_CHECKING:
    from tpkernels.gate.user_kernels.config import Config

PROCESSES = 2
PREPARE = "tpkernels.registered.numeric_cases:prepare"
OURS = "tpkernels.registered.entries:config"
PACKAGES = ("triton", "torch", "numpy")
MOVED = (
    "--bits is no option of `check` any more: in a checkout of the repository run `python -m bench bits`; "
    "bench/ is not part of the installed package"
)


def add_options(parser: ArgumentParser, words: Sequence[str]) -> None:
    if "--bits" in words:
        raise BadUse(MOVED)
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="check the kernels of your own that this gate.toml names"
    )
    parser.add_argument(
        "--init",
        metavar="FOLDER",
        help="write a gate.toml for the kernels of a folder or package, and budgets",
    )
    parser.add_argument(
        "--run",
        metavar="COMMAND",
        help="of --init: what launches them, such as launches.py or 'pytest tests'",
    )
    parser.add_argument("--arch", metavar="LIST", help="compile for these GPUs only, such as sm_90,gfx942")
    parser.add_argument(
        "--only",
        default="",
        metavar="NAME",
        help="what has NAME between slashes in its name, such as linear or '*glu/pointer'",
    )
    parser.add_argument("--skip", choices=("compile", "numerics"), help="leave one half out")
    parser.add_argument(
        "--json", type=written_to, metavar="FILE", help="write all facts and findings into FILE"
    )
    parser.add_argument(
        "--compare",
        metavar="WHAT",
        help="with another Triton, such as triton==3.9.0 or a folder with one, or with a revision",
    )
    parser.add_argument(
        "--format", choices=("text", "markdown", "json", "junit", "github"), help="how --compare prints"
    )
    parser.add_argument("--update", action="store_true", help="make today's numbers the budgets")
    parser.add_argument(
        "--allow-no-budgets",
        action="store_true",
        help="pass by rules alone where there are no budgets for this Triton",
    )


def main(options: Namespace) -> int:
    if options.skip == "compile" and (options.update or options.arch is not None):
        raise BadUse("--update and --arch are about compiling: leave --skip compile out")
    if options.format and not options.compare:
        raise BadUse("--format is about --compare")
    if options.compare and (options.update or options.skip or options.json or options.allow_no_budgets):
        raise BadUse("--compare looks at no budgets and no numbers: give --config, --arch and --only alone")
    require_packages(*PACKAGES)
    if options.compare:
        return _compared(options)

    from tpkernels.gate import compile_gate, computing, report
    from tpkernels.gate.ahead_of_time import ARCHITECTURES
    from tpkernels.gate.compiler_faults import ptxas_in_use
    from tpkernels.gate.user_kernels.config import read, suite_of
    from tpkernels.gate.user_kernels.record import ConfigError

    if options.init is not None:
        from tpkernels.gate.user_kernels import init

        options.config, options.update = options.config or Path("gate.toml"), True
        with bad_use_if(init.InitError), Progress("looking", seconds=SAID_EVERY) as step:
            told = init.write(options.init, _run(options), options.config, PREPARE, step)
        print(told, flush=True)
    start = time.perf_counter()
    architectures = ARCHITECTURES if options.arch is None else options.arch.split(",")
    with bad_use_if(compile_gate.UsageError, ConfigError):
        config = _ours() if options.config is None else read(options.config)
        suite = suite_of(config)
        jobs = [] if options.skip == "compile" else compile_gate.jobs_of(suite, architectures, options.only)
        with Progress("compiling", len(jobs), seconds=SAID_EVERY) as step:
            checked = compile_gate.Checked([], [], [])
            if jobs:
                how = options.update, options.allow_no_budgets
                checked = compile_gate.check(suite, jobs, PROCESSES, step, *how)
        checked.notes.extend(config.notes)
        with Progress("computing", seconds=SAID_EVERY) as step:
            skipped = options.skip == "numerics"
            computed = [] if skipped else computing.check(config, options.only, step, PREPARE, options.update)
        if not checked.compiled and not computed:
            where = f" on {options.arch}" if options.arch else ""
            raise BadUse(f"nothing{where} has {options.only!r} in its name")
        versions = {"tpkernels": __version__} | {name: version(name) for name in PACKAGES}
        versions["ptxas"] = ptxas_in_use()
        seconds = time.perf_counter() - start
        return 1 if report.tell(versions, checked, computed, seconds, options.json) else 0


def _ours() -> Config:
    """The kernels of this package, which take torch to list."""
    from tpkernels.registered import entries

    return entries.config()


def _run(options: Namespace) -> str | None:
    """What launches the kernels; asked for on a terminal."""
    if options.run is None and sys.stdin.isatty():
        return input("what launches the kernels (a script, or a module such as `pytest tests`)? ") or None
    run: str | None = options.run
    return run


def _compared(options: Namespace) -> int:
    from tpkernels.gate.ahead_of_time import ARCHITECTURES
    from tpkernels.gate.compare import Wanted, compare
    from tpkernels.gate.compile_gate import UsageError
    from tpkernels.gate.render import FORMATS
    from tpkernels.gate.user_kernels.config import FAILS, read
    from tpkernels.gate.user_kernels.record import ConfigError

    architectures = ARCHITECTURES if options.arch is None else options.arch.split(",")
    wanted = Wanted(options.config, OURS, architectures, options.only, PROCESSES)
    with bad_use_if(UsageError, ConfigError), Progress("compiling", seconds=SAID_EVERY) as step:
        fails = FAILS if options.config is None else read(options.config).fails
        page = compare(options.compare, wanted, fails, step)
    if not page.rows:
        raise BadUse(f"nothing has {options.only!r} in its name")
    print(FORMATS[options.format or "text"](page))
    return int(any(row.fails for row in page.rows))
