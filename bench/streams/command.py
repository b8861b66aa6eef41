"""`python -m bench streams`: runs what ranks enqueue in many orders, without a GPU.

The programs are our operators over every transport, eager and captured. An order with a race, a deadlock or
other results is a failure; its seed reproduces it.
"""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from functools import partial
from multiprocessing import get_context

from bench.streams.cases import all_programs
from bench.streams.search import search
from tpkernels.cli import SAID_EVERY, BadUse, Progress, add_number, write_json, written_to

ORDERS = 10  # of each program: more than 2,000 in all
PROCESSES = 2


@dataclass(frozen=True)
class Searched:
    """The result of searching the orders of one program."""

    name: str
    orders: int
    tasks: int = 0  # that all ranks have enqueued
    steps: int = 0  # of all orders
    failure: str = ""

    def __str__(self) -> str:
        told = self.failure.replace("\n", "\n    ") or f"{self.orders} orders of {self.tasks} tasks"
        return f"{self.name}: {told}"


def add_options(parser: ArgumentParser, words: Sequence[str]) -> None:
    parser.add_argument("--only", default="*", metavar="NAME", help="programs like this, as '*captured*'")
    add_number(parser, "--orders", "of each program", ORDERS, least=1)
    parser.add_argument("--json", type=written_to, metavar="FILE", help="write all results into FILE")


def main(options: Namespace) -> int:
    """Search all orders and print the results; return 1 if there is a failure."""
    start = time.perf_counter()
    names = [name for name in all_programs() if fnmatchcase(name, options.only)]
    if not names:
        raise BadUse(f"no program is like {options.only!r}; a name: {next(iter(all_programs()))}")
    found = []
    with (
        ProcessPoolExecutor(PROCESSES, get_context("spawn")) as pool,
        Progress("searching orders", len(names), seconds=SAID_EVERY) as step,
    ):
        for one in pool.map(partial(searched, orders=options.orders), names):
            found.append(one)
            step(one.name)
    print(*found, sep="\n")
    failures = sum(bool(one.failure) for one in found)
    orders, seconds = sum(one.orders for one in found), time.perf_counter() - start
    told = f"{len(found)} programs in {orders} orders, {seconds:.0f} s"
    print(f"{failures} failures in {told}" if failures else f"all well: {told}")
    write_json(options.json, {one.name: asdict(one) for one in found})
    return 1 if failures else 0


def searched(name: str, orders: int) -> Searched:
    try:
        program, expected = all_programs()[name]()
        report = search(program, orders, expected, waves=True)
    except Exception as error:  # of the host code, or of the machine: the failure names it
        return Searched(name, orders, failure=f"{type(error).__name__}: {error}")
    return Searched(name, orders, report.tasks, report.steps)
