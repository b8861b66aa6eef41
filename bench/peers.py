"""`python -m bench peers`: ours against the libraries that run on a CPU, as a table of ratios.

Forward and backward. Rounds are interleaved: of one rank they are its processor time, of two they last as
long as on the slower one. A peer that computes something else is an error and has no time. A peer that is
not installed is told.
"""

from __future__ import annotations

import os
import statistics
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from importlib.util import find_spec

from bench.case import Measured, measured_on_ranks
from bench.cases.buckets import LISTS, step_case
from bench.cases.peers import LOCAL_SIZES, block_case, llama_case, local_case
from bench.device import version_of
from bench.measure import Comparison
from tests.ranks import RankPool

PARTS = ("local", "block", "llama", "buckets")
COLUMNS = ("what", "ranks", "ours, ms", "peer", "ours is faster by", "")
SECONDS = 600.0  # of a case, which compiles
ON_GPUS_ALONE = "Liger-Kernel, QuACK, torch's async-TP, whose kernels need a GPU"


def add_options(parser: ArgumentParser, words: Sequence[str]) -> None:
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts of the table")
    parser.add_argument("--rounds", type=int, default=21, metavar="N", help="of each way, default: 21")


def main(options: Namespace) -> int:
    told = ", ".join(f"{name} {version_of(name) or 'not installed'}" for name in ("torch", "transformers"))
    print(f"{told}; load {os.getloadavg()[0]:.1f}\n")
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|", flush=True)
    for row in rows(options.only, options.rounds):
        print(row, flush=True)
    print(f"\nNot compared: {ON_GPUS_ALONE}. Load {os.getloadavg()[0]:.1f} at the end.")
    return 0


def rows(parts: Sequence[str], rounds: int) -> Iterator[str]:
    if "local" in parts:
        with RankPool(1) as pool:
            for name in LOCAL_SIZES:
                yield from of_case(measured_on_ranks(pool, local_case, name, rounds=rounds, timeout=SECONDS))
    if "block" in parts:
        with RankPool(2) as pool:
            for split in (True, False):
                yield from of_case(measured_on_ranks(pool, block_case, split, rounds=rounds, timeout=SECONDS))
    if "llama" in parts and find_spec("transformers") is None:
        yield _row("llama", "-", "-", "transformers", "not measured", "transformers is not installed")
    elif "llama" in parts:
        with RankPool(2) as pool:
            yield from of_case(measured_on_ranks(pool, llama_case, rounds=rounds, timeout=SECONDS))
    if "buckets" in parts:
        ways = ("ours", "naive", "ddp_views", "alone")
        with RankPool(2) as pool:
            for name in LISTS:
                yield from of_case(
                    measured_on_ranks(pool, step_case, name, ways, rounds=rounds, timeout=SECONDS)
                )


def of_case(measured: Measured) -> Iterator[str]:
    """A row for each peer."""
    work, seconds, _ = measured
    peers = {
        "naive": work.naive,
        "compiled": f"{work.naive}, compiled",
        "unsharded": "not split, on each rank",
        "ddp_views": f"{work.naive}, gradients are views",
        "alone": "no reduction, a floor",
    }
    for way in seconds:
        if way == "ours":
            continue
        compared = Comparison(seconds["ours"], seconds[way])
        low, high = compared.quartiles
        spread = f"{compared.ratio:.2f} ({low:.2f} to {high:.2f})"
        yield _row(
            f"{work.op} {work.shape}",
            work.world,
            _milliseconds(seconds["ours"]),
            peers.get(way, way),
            spread,
            "**slower**" if high < 1 else "" if low > 1 else "even",
        )


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _milliseconds(seconds: Sequence[float]) -> str:
    return f"{1e3 * statistics.median(seconds):.3g}"
