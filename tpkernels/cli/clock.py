"""`python -m tpkernels clock KERNEL --shape 8192x4096x3584`: predicts times of kernels on an H100 by a model.

Cycles are those of the machine code, run by `gate.clock` on a model of one SM; times follow from them.
Nothing is measured, and no GPU is needed.
"""

from __future__ import annotations

import re
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from tpkernels.cli import BadUse, Progress, require_packages, write_json, written_to

if TYPE_CHECKING:
    from tpkernels.gate.ahead_of_time import Entry
    from tpkernels.gate.clocking import Predicted

USUAL = (8192, 4096, 4096)
MOST = 2**24  # of tokens, or of features: more than any layer has
ROW = "{:<{width}}  {:>6}  {:<20}  {:>7}  {:<20}  {:>4}  {:>7}  {:>7}  {:>6}  {:>16}  {}"
COLUMNS = ("kernel", "step", "mostly", "edge", "mostly", "busy", "TFLOP/s", "of peak", "waves")
NOTE = "by a model of an H100 SXM; nothing here was measured, see docs/clock.md"


def add_options(parser: ArgumentParser, words: Sequence[str]) -> None:
    one_of = "those with KERNEL between slashes in their names, as in `check --only`"
    parser.add_argument("kernel", metavar="KERNEL", help=one_of)
    layer = f"tokens, out_features and in_features of the layer (default {'x'.join(map(str, USUAL))})"
    parser.add_argument("--shape", type=_shape, default=USUAL, metavar="TxNxK", help=layer)
    parser.add_argument("--json", type=written_to, metavar="FILE", help="write all numbers into FILE")


def main(options: Namespace) -> int:
    require_packages("triton", "torch", "numpy")

    from tpkernels.gate.ahead_of_time import CLOCKED, DIED, CompileJob
    from tpkernels.gate.clocking import ClockedJob, Predicted, predicted
    from tpkernels.gate.workers import results_of
    from tpkernels.registered.workload import FromCatalog

    entries = _entries(options.kernel)
    tasks = [ClockedJob(CompileJob(one, CLOCKED[0]), FromCatalog(one, options.shape)) for one in entries]
    died: Predicted | str = DIED
    with Progress("clocking", len(tasks)) as step:
        done = results_of(predicted, tasks, min(2, len(tasks)), step, died)
    found = [one for one in done if isinstance(one, Predicted)]
    failures = [f"{one.name}: {why}" for one, why in zip(entries, done, strict=True) if isinstance(why, str)]
    if found:
        print("{:,} x {:,} x {:,} tokens, out_features and in_features,".format(*options.shape), f"{NOTE}\n")
        width = max(len(one.entry) for one in found)
        print(ROW.format(*COLUMNS, "time (model)", "bound by", width=width))
        print(*(ROW.format(*_cells(one), width=width) for one in found), sep="\n", end="\n\n")
        print("cycles: step, of the main loop, of all blocks on an SM; edge, of a tile, or else of a block")
    if guessed := [one.entry for one in found if one.cost.guessed]:
        print(f"branches that depend on data were guessed in {', '.join(guessed)}")
    shape = dict(zip(("tokens", "out_features", "in_features"), options.shape, strict=True))
    kernels = [asdict(one) for one in found]
    write_json(options.json, {"note": NOTE, "shape": shape, "failures": failures, "kernels": kernels})
    print(*failures, sep="\n", end="\n" * bool(failures))
    return int(bool(failures))


def _shape(text: str) -> tuple[int, int, int]:
    found = re.fullmatch(r"([0-9]{1,9})x([0-9]{1,9})x([0-9]{1,9})", text)
    sizes = [int(size) for size in found.groups()] if found else [0]
    if not all(0 < size <= MOST for size in sizes):
        raise ArgumentTypeError(
            f"expected tokens x out_features x in_features, each from 1 to {MOST:,}, such as 8192x4096x3584; "
            f"got {text!r}"
        )
    return sizes[0], sizes[1], sizes[2]


def _entries(wanted: str) -> list[Entry]:
    """Return the catalog entries with this part in their names that the clock supports."""
    from tpkernels.gate.ahead_of_time import CLOCKED
    from tpkernels.gate.compile_gate import has_parts
    from tpkernels.registered.entries import catalog

    named = [entry for entry in catalog() if has_parts(entry.name, wanted)]
    if not named:
        raise BadUse(f"no kernel has {wanted!r} between slashes in its name; one is {catalog()[0].name}")
    clocked = [entry for entry in named if set(entry.architectures) & set(CLOCKED)]
    if not clocked:
        known = ", ".join(sorted({name for entry in named for name in entry.architectures}))
        raise BadUse(f"expected a kernel for {', '.join(CLOCKED)}: {wanted!r} is compiled for {known}")
    return clocked


def _cells(one: Predicted) -> tuple[str, ...]:
    cost, model = one.cost, one.model
    step, rates = ("-", "-"), ("-", "-", "-")
    if cost.step is not None:
        step = f"{cost.step.cycles:,.0f}", next(iter(cost.step.waits), "-")
        rates = f"{model.busy:.0%}", f"{model.tflops:,.0f}", f"{model.of_peak:.0%}"
    edge = next(iter(cost.edge.waits), "-")
    unit, size = ("ms", 1e3) if model.seconds >= 1e-3 else ("us", 1e6)
    time = f"{model.seconds * size:.3g} {unit} +-{model.error:.0%}"
    return one.entry, *step, f"{cost.edge.cycles:,.0f}", edge, *rates, f"{model.waves:.2f}", time, model.bound
