"""`python -m bench buckets`: gradient buckets against both forms of DistributedDataParallel, as a table.

DDP has 25 MB buckets, and gradients that are set to None: in the other form, they are views of its buckets.
Rounds are interleaved, and last as long as on their slowest rank. "No reduction" is forward and backward
alone, a floor that no way to reduce can get below.
"""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from bench.case import timed_on_ranks
from bench.cases.buckets import LISTS, low, step_case
from bench.results import duration
from tests.ranks import RankPool
from tpkernels.cli import add_number

WAYS = {"ours": "ours", "naive": "DDP", "ddp_views": "DDP, views", "alone": "no reduction"}
COLUMNS = ("step", "ranks", *WAYS.values(), "the better DDP / ours", "ours / no reduction", "load average")


def add_options(parser: ArgumentParser, words: Sequence[str]) -> None:
    parser.add_argument("--only", nargs="+", choices=LISTS, default=[*LISTS], help="lists of parameters")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2], metavar="N", help="default: 2")
    add_number(parser, "--rounds", "of each way", 21, least=1)


def main(options: Namespace) -> int:
    print("The lowest tenth of rounds ends there.\n")
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|")
    for ranks in options.ranks:
        for name in options.only:
            print(row(ranks, name, options.rounds), flush=True)
    return 0


def row(ranks: int, list_name: str, rounds: int) -> str:
    before = os.getloadavg()[0]
    with RankPool(ranks) as pool:
        _, seconds = timed_on_ranks(pool, step_case, list_name, [*WAYS], rounds=rounds, timeout=500)
    taken = {way: low(seconds[way]) for way in WAYS}
    ddp, load = min(taken["naive"], taken["ddp_views"]), f"{before:.1f} to {os.getloadavg()[0]:.1f}"
    times = [duration(1e3 * seconds) for seconds in taken.values()]
    ratios = f"{ddp / taken['ours']:.2f}", f"{taken['ours'] / taken['alone']:.2f}"
    return f"| {' | '.join([list_name, str(ranks), *times, *ratios, load])} |"
