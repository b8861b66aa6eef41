"""`python -m tpkernels check`: would the kernels still be right and fast? Answered without a GPU.

Compiles every catalog entry and holds what the compiler made of it to rules and budgets, then runs every
launcher in Triton's interpreter against float64. Exit code 1 means a regression. With --config
it does the same for kernels of others. With --bits it does something else, see `check_bits`.
"""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from tpkernels.cli import SAID_EVERY, OneLineParser, Progress, check_bits, written_to

PROCESSES = 2
PACKAGES = ("triton", "torch", "numpy")
OF_KERNELS, OF_BITS = ("config", "arch", "skip", "update"), ("schedules", "seed", "world_size")


def main(argv: Sequence[str]) -> int:
    parser = OneLineParser(
        prog="python -m tpkernels check",
        description="Compile the kernels and run them in Triton's interpreter, without a GPU.",
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="check the kernels of your own that this gate.toml names"
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
    parser.add_argument("--update", action="store_true", help="make today's numbers the budgets")
    check_bits.add_options(parser)
    options = parser.parse_args(argv)
    _refuse(parser, options, OF_KERNELS if options.bits else OF_BITS)
    if options.bits:
        return _bits(parser, options)
    if options.skip == "compile" and (options.update or options.arch is not None):
        parser.error("--update and --arch are about compiling: leave --skip compile out")
    for package in PACKAGES:
        if find_spec(package) is None:
            parser.error(f"{package} is not installed, and the check needs it")

    from tpkernels.gate import compile_gate, numerics, report
    from tpkernels.gate.ahead_of_time import ARCHITECTURES
    from tpkernels.gate.user_kernels import suite as own
    from tpkernels.gate.user_kernels.record import ConfigError

    start = time.perf_counter()
    architectures = ARCHITECTURES if options.arch is None else options.arch.split(",")
    compute: own.Compute
    try:
        if options.config is None:
            suite, compute = compile_gate.ours(), numerics.check
        else:
            suite, compute = own.read(options.config)
        jobs = [] if options.skip == "compile" else compile_gate.jobs_of(suite, architectures, options.only)
        with Progress("compiling", len(jobs), seconds=SAID_EVERY) as step:
            compiled, notes = (
                compile_gate.check(suite, jobs, PROCESSES, step, options.update) if jobs else ([], [])
            )
        with Progress("computing", seconds=SAID_EVERY) as step:
            computed = [] if options.skip == "numerics" else compute(options.only, step)
        if not compiled and not computed:
            where = f" on {options.arch}" if options.arch else ""
            parser.error(f"nothing{where} has {options.only!r} in its name")
        versions = {name: import_module(name).__version__ for name in ("tpkernels", *PACKAGES)}
        seconds = time.perf_counter() - start
        return 1 if report.tell(versions, compiled, computed, notes, seconds, options.json) else 0
    except (compile_gate.UsageError, ConfigError) as error:
        parser.error(str(error))


def _refuse(parser: ArgumentParser, options: Namespace, names: Sequence[str]) -> None:
    for name in names:
        if getattr(options, name) is not None and getattr(options, name) is not False:
            how = "is about kernels: leave it out beside --bits" if options.bits else "needs --bits"
            parser.error(f"--{name.replace('_', '-')} {how}")


def _bits(parser: ArgumentParser, options: Namespace) -> int:
    schedules = check_bits.SCHEDULES if options.schedules is None else options.schedules
    seed = check_bits.SEED if options.seed is None else options.seed
    ranks = options.world_size or check_bits.RANKS
    try:
        return check_bits.run(schedules, seed, ranks, options.only, options.json, said_every=SAID_EVERY)
    except check_bits.NothingChosenError as error:
        parser.error(str(error))
