"""`python -m tpkernels clock KERNEL --shape 8192x4096x3584`: predicts times of kernels on an H100 by a model.

Cycles are those of the machine code, run by `gate.clock` on a model of one SM; times follow from them.
Nothing is measured, and no GPU is needed. For the name of an op `clock_ops` does the work.
"""

from __future__ import annotations

import re
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tpkernels.cli import BadUse, Progress, drawn_into, require_packages, write_json, written_to
from tpkernels.planning.step_time import OPERATORS

if TYPE_CHECKING:
    from tpkernels.gate.ahead_of_time import Entry

PROCESSES = 2
PACKAGES = ("triton", "torch", "numpy")
USUAL = (8192, 4096, 4096)
MOST = 2**24  # of tokens, or of features: more than any layer has


def add_options(parser: ArgumentParser, words: Sequence[str]) -> None:
    if words and words[0] in OPERATORS:
        from tpkernels.cli import clock_ops  # which loads torch

        clock_ops.add_options(parser)
        return
    parser.add_argument(
        "kernel",
        metavar="KERNEL",
        help="those with KERNEL between slashes in their names, as in `check --only`; or the name of an op",
    )
    parser.add_argument(
        "--shape",
        type=_shape,
        default=USUAL,
        metavar="TxNxK",
        help=f"tokens, out_features and in_features of the layer (default {'x'.join(map(str, USUAL))})",
    )
    parser.add_argument("--json", type=written_to, metavar="FILE", help="write all numbers into FILE")
    parser.add_argument(
        "--picture",
        type=drawn_into,
        metavar="FILE",
        help="draw what one SM does during a tile, as PNG or SVG",
    )


def main(options: Namespace) -> int:
    if "op" in options:
        from tpkernels.cli import clock_ops

        return clock_ops.main(options)
    require_packages(*PACKAGES)
    _require_tools()

    from tpkernels.cli.clock_ops import DIED, ClockRequest, as_json, clock_kernel, picture_of, table
    from tpkernels.gate.workers import results_of

    entries = _entries(options.kernel)
    if options.picture and len(entries) > 1:
        raise BadUse(
            f"--picture is of one kernel, and {len(entries)} have {options.kernel!r} in their names, such as "
            f"{entries[0].name}"
        )
    requests = [ClockRequest(entry, options.shape, bool(options.picture)) for entry in entries]
    with Progress("clocking", len(requests)) as step:
        results = results_of(clock_kernel, requests, min(PROCESSES, len(requests)), step, DIED)
    found = [one for one in results if not isinstance(one, str)]
    pairs = zip(entries, results, strict=True)
    failures = [f"{entry.name}: {one}" for entry, one in pairs if isinstance(one, str)]
    if found:
        print(table(options.shape, found))
    write_json(options.json, as_json(options.shape, found, failures))
    if options.picture and found:
        picture_of(found[0]).write(options.picture)
        print(options.picture)
    for failure in failures:
        print(failure)
    return 1 if failures else 0


def _shape(text: str) -> tuple[int, int, int]:
    found = re.fullmatch(r"([0-9]{1,9})x([0-9]{1,9})x([0-9]{1,9})", text)
    sizes = [int(size) for size in found.groups()] if found else []
    if not sizes or not all(0 < size <= MOST for size in sizes):
        raise ArgumentTypeError(
            f"expected tokens x out_features x in_features, each from 1 to {MOST:,}, such as 8192x4096x3584; "
            f"got {text!r}"
        )
    return sizes[0], sizes[1], sizes[2]


def _require_tools() -> None:
    """Refuse a Triton without its tools."""
    import triton

    for tool in ("ptxas", "cuobjdump"):
        try:
            _ = getattr(triton.knobs.nvidia, tool).path
        except Exception as error:  # each version of Triton has its own
            raise BadUse(f"{tool}, which Triton brings along, is missing: {error}") from error


def _entries(wanted: str) -> list[Entry]:
    """Return the catalog entries with this part in their names that the clock supports."""
    from tpkernels.dispatch.registered import catalog
    from tpkernels.gate.ahead_of_time import CLOCKED
    from tpkernels.gate.compile_gate import has_parts

    named = [entry for entry in catalog() if has_parts(entry.name, wanted)]
    if not named:
        known = f"one is {catalog()[0].name}; ops are {', '.join(OPERATORS)}"
        raise BadUse(f"no kernel has {wanted!r} between slashes in its name; {known}")
    clocked = [entry for entry in named if set(entry.architectures) & set(CLOCKED)]
    if not clocked:
        known = ", ".join(sorted({name for entry in named for name in entry.architectures}))
        raise BadUse(f"expected a kernel for {', '.join(CLOCKED)}: {wanted!r} is compiled for {known}")
    return clocked
