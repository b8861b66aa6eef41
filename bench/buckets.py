"""`python -m bench buckets`: gradient buckets against both forms of DistributedDataParallel, as a table.

DDP has 25 MB buckets, and gradients that are set to None: in the other form, they are views of its buckets.
Rounds are interleaved, and last as long as on their slowest rank. Ways that take much memory, GPT-2 small's,
have processes of their own, ours with one other at a time: 1.3 GB a process. "No reduction" is forward and
backward alone, a floor that no way to reduce can get below.
"""

from __future__ import annotations

import os
import statistics
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from bench.case import Case, timed_on_ranks
from bench.cases.buckets import GROWTH, apart, construction_case, low, step_case
from bench.measure import Seconds
from tests.ranks import RankPool

FORMS = {"naive": "DDP", "ddp_views": "DDP, views"}
FLOOR = "alone"
WAYS = ("ours", *FORMS, FLOOR)
COLUMNS = (
    *("what", "ranks", "ours", *FORMS.values(), "no reduction", "the better DDP / ours"),
    *("ours / no reduction", "rounds", "load average"),
)
PARTS = ("step", "growth", "gpt2_small")


@dataclass(frozen=True)
class Row:
    """What each way took by round, interleaved with ours."""

    what: str
    ranks: int
    compared: Sequence[Seconds]  # one for all ways, or one for each beside ours
    loads: tuple[float, float]  # of the last minute, before and after

    @property
    def ratio(self) -> float:
        """Against the form that is the harder to beat."""
        return min(self._to_ours(form) for form in FORMS)

    def __str__(self) -> str:
        has_floor = any(FLOOR in seconds for seconds in self.compared)
        ratios = f"{self.ratio:.2f}", f"{1 / self._to_ours(FLOOR):.2f}" if has_floor else "-"
        rounds = sum(len(seconds["ours"]) for seconds in self.compared)
        loads = f"{self.loads[0]:.1f} to {self.loads[1]:.1f}"
        cells = [self.what, self.ranks, *map(self._times, WAYS), *ratios, rounds, loads]
        return f"| {' | '.join(map(str, cells))} |"

    def _to_ours(self, way: str) -> float:
        """Its time as a multiple of ours, measured interleaved with it."""
        (beside,) = (seconds for seconds in self.compared if way in seconds)
        return low(beside[way]) / low(beside["ours"])

    def _times(self, way: str) -> str:
        taken = [*chain.from_iterable(seconds.get(way, []) for seconds in self.compared)]
        return f"{_milliseconds(low(taken))} ({_milliseconds(statistics.median(taken))})" if taken else "-"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.3g}"


def add_options(parser: ArgumentParser, words: Sequence[str]) -> None:
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts of the table")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2], metavar="N", help="default: 2")
    parser.add_argument("--rounds", type=int, default=21, metavar="N", help="of each way, default: 21")


def main(options: Namespace) -> int:
    print("Milliseconds: the lowest tenth of rounds ends there (in parentheses: half of them).\n")
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|")
    for ranks in options.ranks:
        for row in _rows(options.only, ranks, options.rounds):
            print(row, flush=True)
    return 0


def _rows(parts: Sequence[str], ranks: int, rounds: int) -> Iterator[Row]:
    with RankPool(ranks) as pool:
        if "step" in parts:
            yield _together(pool, "step, 400 small tensors (2.1 MB)", step_case, "400_small", WAYS, rounds)
        for count in GROWTH if "growth" in parts else ():
            parameters, list_name = f"{count:,} parameters", f"{count}_small"
            few = max(3, rounds // 3)  # DDP takes seconds
            yield _together(pool, f"construction, {parameters}", construction_case, list_name, WAYS[:-1], few)
            yield _together(pool, f"step, {parameters}", step_case, list_name, WAYS, rounds)
    if "gpt2_small" in parts:
        before = os.getloadavg()[0]
        compared = []
        for way in WAYS[1:]:
            with RankPool(2 * ranks) as pool:
                compared.append(apart(pool, "gpt2_small", ["ours", way], rounds)[0])
        yield Row("step, GPT-2 small (498 MB)", ranks, compared, (before, os.getloadavg()[0]))


def _together(
    pool: RankPool, what: str, case: Callable[..., Case], list_name: str, ways: Sequence[str], rounds: int
) -> Row:
    before = os.getloadavg()[0]
    _, seconds = timed_on_ranks(pool, case, list_name, ways, rounds=rounds, timeout=500)
    return Row(what, pool.world_size, [seconds], (before, os.getloadavg()[0]))
