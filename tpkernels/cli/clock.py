"""`python -m tpkernels clock KERNEL --shape 8192x4096x3584`: how long kernels take on an H100, by a model.

Cycles are those of the machine code, run by `gate.clock` on a model of one SM; times follow from them.
Nothing is measured, and no GPU is needed. The name of an op is handed on to `clock_ops`.
"""

from __future__ import annotations

import json
import re
from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpkernels.cli import OneLineParser, Progress, written_to
from tpkernels.pictures.figure import NO_MATPLOTLIB, can_draw

if TYPE_CHECKING:
    from tpkernels.cli.clock_kernel import Clocked
    from tpkernels.gate.ahead_of_time import Entry

PROCESSES = 2
PACKAGES = ("triton", "torch", "numpy")
USUAL = (8192, 4096, 4096)
MOST = 2**24  # of tokens, or of features: more than any layer has


def main(argv: Sequence[str]) -> int:
    ops = _ops()
    if argv and argv[0] in ops:
        return int(ops[argv[0]](argv))
    parser = _parser()
    options = parser.parse_args(argv)
    for package in PACKAGES:
        if find_spec(package) is None:
            parser.error(f"{package} is not installed, and the clock needs it")
    if missing := _missing_tool():
        parser.error(missing)
    if options.picture and not can_draw():
        parser.error(NO_MATPLOTLIB)

    from tpkernels.cli.clock_kernel import DIED, Request, clock_kernel
    from tpkernels.gate.workers import results_of

    entries = _entries(parser, options.kernel)
    if options.picture and len(entries) > 1:
        parser.error(
            f"--picture is of one kernel, and {len(entries)} have {options.kernel!r} in their names, such as "
            f"{entries[0].name}"
        )
    requests = [Request(entry, options.shape, bool(options.picture)) for entry in entries]
    with Progress("clocking", len(requests)) as step:
        results = results_of(clock_kernel, requests, min(PROCESSES, len(requests)), step, DIED)
    return _tell(parser, options, entries, results)


def _parser() -> OneLineParser:
    parser = OneLineParser(
        prog="python -m tpkernels clock",
        description="Predict by a model what kernels, or an op with its communication, take. Needs no GPU.",
    )
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
        type=written_to,
        metavar="FILE",
        help="draw what one SM does during a tile, as PNG or SVG",
    )
    return parser


def _shape(text: str) -> tuple[int, int, int]:
    found = re.fullmatch(r"([0-9]{1,9})x([0-9]{1,9})x([0-9]{1,9})", text)
    sizes = [int(size) for size in found.groups()] if found else []
    if not sizes or not all(0 < size <= MOST for size in sizes):
        raise ArgumentTypeError(
            f"expected tokens x out_features x in_features, each from 1 to {MOST:,}, such as 8192x4096x3584; "
            f"got {text!r}"
        )
    return sizes[0], sizes[1], sizes[2]


def _ops() -> dict[str, Any]:
    """Names of ops that can be clocked -> what clocks them."""
    if find_spec("tpkernels.cli.clock_ops") is None:
        return {}
    ops = import_module("tpkernels.cli.clock_ops")
    return dict.fromkeys(ops.OPS, ops.main)


def _missing_tool() -> str:
    """What Triton lacks of what it should have brought along."""
    import triton

    for tool in ("ptxas", "cuobjdump"):
        try:
            _ = getattr(triton.knobs.nvidia, tool).path
        except Exception as error:  # each version of Triton has its own
            return f"{tool}, which Triton brings along, is missing: {error}"
    return ""


def _entries(parser: OneLineParser, wanted: str) -> list[Entry]:
    from tpkernels.gate.ahead_of_time import CLOCKED
    from tpkernels.gate.catalog import catalog, has_parts

    named = [entry for entry in catalog() if has_parts(entry.name, wanted)]
    if not named:
        known = f"one is {catalog()[0].name}; ops are {', '.join(_ops())}"
        parser.error(f"no kernel has {wanted!r} between slashes in its name; {known}")
    clocked = [entry for entry in named if set(entry.architectures) & set(CLOCKED)]
    if not clocked:
        known = ", ".join(sorted({name for entry in named for name in entry.architectures}))
        parser.error(f"expected a kernel for {', '.join(CLOCKED)}: {wanted!r} is compiled for {known}")
    return clocked


def _tell(
    parser: OneLineParser, options: Namespace, entries: Sequence[Entry], results: Sequence[Clocked | str]
) -> int:
    from tpkernels.cli.clock_kernel import as_json, table

    found = [one for one in results if not isinstance(one, str)]
    pairs = zip(entries, results, strict=True)
    failures = [f"{entry.name}: {one}" for entry, one in pairs if isinstance(one, str)]
    if found:
        print(table(options.shape, found))
    if options.json:
        report = as_json(options.shape, found, failures)
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if options.picture and found:
        print(_draw(options.picture, found[0]))
    for failure in failures:
        print(failure)
    return 1 if failures else 0


def _draw(path: Path, one: Clocked) -> str:
    """The path of what was drawn."""
    from tpkernels.cli.clock_picture import time_line

    assert one.drawn is not None, "asked for with --picture"
    run, tiles, steps = one.drawn
    of_steps = f" of {steps} of {one.steps} steps" if one.steps else ""
    what = f"{tiles} {'tile' if one.steps else 'block'}{'s' * (tiles > 1)}{of_steps} on one SM, by a model"
    picture = time_line(one.name, run, note=what)
    if path.suffix == ".svg":
        path.write_text(picture.svg, encoding="utf-8")
    else:
        path.write_bytes(picture.png)
    return str(path)
