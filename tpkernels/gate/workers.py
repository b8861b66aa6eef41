"""Work in processes of its own, where a compiler that dies takes nothing but its own item along.

They are forks where they can be: to import torch and Triton again takes longer than to compile an entry.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, get_context
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def results_of(
    work: Callable[[Item], Result],
    items: Sequence[Item],
    processes: int,
    report: Callable[[Item], None],
    of_the_dead: Result,
) -> list[Result]:
    """What `work` gives of each item, in their order.

    work: a function of a module; what it does with errors is its own business
    report: hears of each item as it is done
    of_the_dead: the result of an item whose process died
    """
    if not items:
        return []
    others = set(active_children())
    results: dict[int, Result] = {}
    lost: list[int] = []
    with _pool(processes) as pool:
        futures = {pool.submit(work, item): number for number, item in enumerate(items)}
        try:
            for future in as_completed(futures):
                number = futures[future]
                try:
                    results[number] = future.result()
                    report(items[number])
                except BrokenProcessPool:
                    lost.append(number)
        except BaseException:  # leaving the pool would first do all the rest, or what is under way
            pool.shutdown(wait=False, cancel_futures=True)
            for process in set(active_children()) - others:
                process.kill()
            raise
    for number in lost:  # one died and took the others with it: each in a process of its own shows which
        report(items[number])
        with _pool(1) as pool:
            try:
                results[number] = pool.submit(work, items[number]).result()
            except BrokenProcessPool:
                results[number] = of_the_dead
    return [results[number] for number in range(len(items))]


def _pool(processes: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(processes, mp_context=get_context(_start()), initializer=_compile_here)


def _start() -> str:
    """Spawned where kernels are interpreted, which Triton reads on import; threads do not survive a fork."""
    interpreted = "TRITON_INTERPRET" in os.environ
    return (
        "fork" if sys.platform == "linux" and not interpreted and threading.active_count() == 1 else "spawn"
    )


def _compile_here() -> None:
    gc.freeze()  # what was imported, which is most, is looked through no more
    gc.set_threshold(100_000, 20, 100)
    os.environ.pop("TRITON_INTERPRET", None)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches all: end without a word, one speaks for all
