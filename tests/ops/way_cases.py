"""What ranks run in tests of the choice between ways to move a shape."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from tests.ops.auto_cases import heard
from tests.ops.parallel_behaviour import block, operands_of, with_gradients
from tests.ops.parallel_cases import Setting, prepare
from tests.ops.transport_cases import open_stand_in, using
from tpkernels.comm.agreement import offers_of_all
from tpkernels.comm.calls import handshake
from tpkernels.comm.transports import c10d, select
from tpkernels.comm.transports.mailbox import Opening
from tpkernels.dispatch.cache import Cache, Choice, Versions
from tpkernels.ops.tensor_parallel import way_chooser, ways
from tpkernels.ops.tensor_parallel.parallel import start_rows
from tpkernels.ops.tensor_parallel.way_chooser import ROUNDS, Run, Way, WayChooser

KEY = "gathers of this test"
VERSIONS = Versions("no GPU", "torch", "triton", "kernels")
PLAIN = {"one": (10.0, 10.0), "many": (5.0, 20.0), "memory": (8.0, 8.0)}  # milliseconds on each rank


def tell(texts: Sequence[str]) -> list[list[str]]:
    return offers_of_all(KEY, handshake("op", "a test", dist.group.WORLD), "", "", texts)


class Table:
    """Ways whose runs take what a table says, and who counts them."""

    def __init__(self, times: Mapping[str, tuple[float, ...]], broken: Mapping[str, str]) -> None:
        """broken: how a way fails on the last rank"""
        self.times, self.broken = times, broken if dist.get_rank() == dist.get_world_size() - 1 else {}
        self.runs, self.closed = dict.fromkeys(times, 0), list[str]()

    def ways(self) -> list[Way]:
        return [
            Way(
                name,
                lambda name=name: self._open(name),
                lambda name=name: self.closed.append(name),
                recovers=name == "memory",
            )
            for name in self.times
        ]

    def _open(self, name: str) -> Run:
        if self.broken.get(name) == "cannot open":
            raise MemoryError("planted")
        return lambda: self._run(name)

    def _run(self, name: str) -> Tensor:
        self.runs[name] += 1
        if self.broken.get(name) == "raises":
            raise RuntimeError("planted in a run")
        return torch.full((3,), 2.0 if self.broken.get(name) == "wrong numbers" else 1.0)

    def clock(self, name: str, run: Run) -> float:
        run()
        return self.times[name][dist.get_rank()]


Found = tuple[str, str, dict[str, int], list[str], list[str]]  # name, source, runs, closed, warnings


def chosen(folder: Path | None, options: Mapping[str, Any]) -> Found:
    """options: `broken` as of `Table`; `cached`, `why_not` and `default` of each rank"""
    rank, table = dist.get_rank(), Table(PLAIN, options.get("broken", {}))
    cache = Cache(folder and folder / str(rank), VERSIONS)
    if cached := options.get("cached", ("", ""))[rank]:
        cache.put(KEY, Choice(cached, {}))
    chooser = WayChooser(tell, table.clock, cache)
    default, why_not = options.get("default", ("one", "one"))[rank], options.get("why_not", ("", ""))[rank]
    with heard("tpkernels.dispatch") as said:
        ways_in_any_order = table.ways()[:: -1 if rank else 1]
        verdict = chooser.choose(KEY, ways_in_any_order, default, why_not)
    dist.barrier()
    return verdict.name, verdict.source, table.runs, table.closed, said


def fails_in_a_message() -> str:
    """What is said of a way that sends, and fails half-way on the only rank that runs it."""
    table = Table(PLAIN, {"many": "raises"})
    try:
        WayChooser(lambda texts: [list(texts)], table.clock, Cache(None, VERSIONS)).choose(
            KEY, table.ways(), "one"
        )
    except RuntimeError as error:
        return str(error)
    return "no error"


def times(of: Mapping[str, float]) -> Callable[[torch.device], Any]:
    """A clock that says so, whatever the device."""

    def clock(name: str, run: Run) -> float:
        run()
        return of[name]

    return lambda device: clock


@contextmanager
def as_on_gpus(of: Mapping[str, float], cache: Cache, opener: Any = open_stand_in) -> Iterator[list[str]]:
    """Ways are timed as between GPUs, on memory of the CPU and gloo; says what is logged."""
    with (
        using("auto", "triton"),
        patch.object(ways, "times_on", lambda like: True),
        patch.object(ways, "clock_on", times(of)),
        patch.object(ways, "cache_on", lambda device: cache),
        patch.object(c10d, "_processors", lambda device: 1),
        patch.object(way_chooser, "ROUNDS", 1),
        patch.dict(select.openers, {"symmetric": opener}),
        heard("tpkernels.choices") as said,
    ):
        yield said


def no_symmetric_memory(opening: Opening) -> Any:
    """On one rank."""
    problem = "torch has none" * (dist.get_rank() == 1)
    offers_of_all(opening.name, opening.begin(), problem)
    raise AssertionError("all have been told")


def block_by(of: Mapping[str, float], how: str = "") -> tuple[float, list[str], int, int]:
    """(how far a block is from c10d, lines of the log, of its second run, exchanges that are open)."""
    prepare(Setting())
    operands = operands_of(0)
    with using("c10d"):
        group = dist.new_group()
        expected = with_gradients(lambda *t: block(*t, sequence_parallel=True, group=group), operands)
    group = dist.new_group()
    opener = no_symmetric_memory if how == "no symmetric memory" else open_stand_in
    with ExitStack() as stack:
        said = stack.enter_context(as_on_gpus(of, Cache(None, VERSIONS), opener))
        if how == "capture":
            stack.enter_context(patch.object(ways, "obstacle", lambda device: "a graph is captured"))
        if how == "TUNE=0":
            stack.enter_context(patch.dict(os.environ, {"TPKERNELS_TUNE": "0"}))
        found = with_gradients(lambda *t: block(*t, sequence_parallel=True, group=group), operands)
        first = len(said)
        with_gradients(lambda *t: block(*t, sequence_parallel=True, group=group), operands)
    off = max(float((x - y).norm() / y.norm()) for x, y in zip(found, expected, strict=True))
    return off, said[:first], len(said) - first, len(select._of_group[id(group)]._open)


def memory_of_two_choices() -> tuple[list[str], bool, set[float]]:
    """If another op chooses otherwise: (exchanges of one shape, whether the first works, its time-outs)."""
    prepare(Setting())
    group = dist.new_group(timeout=timedelta(seconds=40))
    cache, found, timeouts = Cache(None, VERSIONS), [], set()
    x = torch.full((8, 16), float(dist.get_rank()))
    memory, collectives = (
        {"1 collective": 2.0, "2 collectives": 3.0},
        {"1 collective": 1.0, "2 collectives": 3.0},
    )
    for times_of, op in ((memory, "one"), (collectives, "another"), (memory, "one")):
        with as_on_gpus({"symmetric": 1.5, **times_of}, cache), patch.object(ways, "TRIAL_SECONDS", 3.0):
            found.append(start_rows(op, "x", x, group, 32).wait())
        timeouts |= {exchange.timeout for exchange in select._of_group[id(group)]._open.values()}
    names = [type(exchange).__name__ for exchange in select._of_group[id(group)].chosen.values()]
    right = all(full.equal(found[0]) and float(full[-1, 0]) == 1.0 for full in found)
    return names, right, timeouts


def weight_shards_that_differ() -> list[bool]:
    """Whether rows are right where a rank's products have other widths, at times those of the call before."""
    prepare(Setting())
    group, rank = dist.group.WORLD, dist.get_rank()
    x = torch.full((8, 16), float(rank))
    with as_on_gpus({"1 collective": 2.0, "2 collectives": 1.0, "symmetric": 3.0}, Cache(None, VERSIONS)):
        widths = (32, 32 - rank, 32, 0 if rank else 32)
        full = [start_rows("op", "x", x, group, features).wait() for features in widths]
    return [float(rows[-1, 0]) == 1.0 for rows in full]


ROUNDS_AND_TRIAL = ROUNDS + 1
