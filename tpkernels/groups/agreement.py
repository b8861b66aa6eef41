"""Agreement through the key-value store: all ranks make the same request, or all raise the same error.

An agreement takes a few store operations. A collective would need a device, and would hang if a rank does not
call it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha1
from itertools import count
from typing import TypeGuard

import torch.distributed as dist
from torch.distributed import DistNetworkError, PrefixStore, Store

from tpkernels.errors import cause_of, difference, quoted
from tpkernels.groups import c10d
from tpkernels.groups.kinds import Ranks
from tpkernels.groups.state import ParallelStateError
from tpkernels.tp_invariance import described

AGREED = "agreed"
_FAKE_CALLS = count(1)


def agree(request: str, timeout: timedelta | None, ranks: Ranks | None = None) -> int:
    """Raise unless `ranks`, by default all, make the same request; return a new number for each call."""
    if not dist.is_available() or not dist.is_initialized():
        raise ParallelStateError(
            "torch.distributed is not initialized: call torch.distributed.init_process_group(...) first"
        )
    if dist.get_backend() == "fake":  # a single process
        return next(_FAKE_CALLS)
    return _world(timeout, ranks).agree(request + described())


def meet(
    request: str, call: int, problem: str, timeout: timedelta | None, ranks: Ranks | None = None
) -> None:
    """Wait until `ranks`, by default all, have fulfilled their request. problem: why this rank has not"""
    if dist.get_backend() != "fake":
        _world(timeout, ranks).meet(request, call, problem)
    elif problem:
        raise ParallelStateError(problem)


def _world(timeout: timedelta | None, ranks: Ranks | None = None) -> World:
    limit = timeout if is_timeout(timeout) else c10d.default_timeout()
    store = c10d.default_store()
    if ranks is None:
        return World(store, dist.get_rank(), dist.get_world_size(), limit)
    store = PrefixStore(f"tpkernels/among/{digest(ranks)}", store)
    return World(store, dist.get_rank(), len(ranks), limit, ranks)


def digest(ranks: object) -> str:
    """Return a short hash of ranks, the same in every process."""
    return sha1(str(ranks).encode(), usedforsecurity=False).hexdigest()[:16]


def is_timeout(timeout: object) -> TypeGuard[timedelta]:
    return isinstance(timeout, timedelta) and timeout > timedelta()


@dataclass(frozen=True)
class World:
    """The ranks that agree, their store, and how long they wait for each other."""

    store: Store
    rank: int
    size: int
    timeout: timedelta
    ranks: tuple[int, ...] | None = None  # if not ranks 0 to size - 1

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(range(self.size)) if self.ranks is None else self.ranks

    def agree(self, request: str) -> int:
        """Compare `request` with the first rank's; return the number of requests of this world so far.

        All ranks raise the same error if a rank's request differs, or within `timeout` if a rank makes none.
        """
        with _lost_store_told(request):
            # Each rank counts its calls in the store, so that the count ends with the world.
            call = PrefixStore("tpkernels/calls", self.store).add(str(self.rank), 1)
            _Ballot(self, request, PrefixStore(f"tpkernels/agreement/{call}", self.store)).compare()
        return call

    def meet(self, request: str, call: int, problem: str) -> None:
        """Wait until all ranks have fulfilled the request; all raise the same error if a rank has not.

        call: the number that `agree` returned
        problem: why this rank has not; "" if it has
        """
        request = f"the end of {request}"
        with _lost_store_told(request):
            _Ballot(self, request, PrefixStore(f"tpkernels/end/{call}", self.store)).meet(problem)


@contextmanager
def _lost_store_told(request: str) -> Iterator[None]:
    try:
        yield
    except DistNetworkError as error:
        raise ParallelStateError(
            f"the store of torch.distributed is gone, and most likely rank 0 with it, in {request}: "
            f"{cause_of(error)}"
        ) from error


@dataclass(frozen=True)
class _Ballot:
    """The store's keys for one call; the first verdict that a rank writes holds for all ranks."""

    world: World
    request: str
    store: Store

    def compare(self) -> None:
        rank, first = self.world.rank, self.world.members[0]
        self.store.set(f"arrived/{rank}", "")
        if rank == first:
            self.store.set("request", self.request)
        late = self.store.check(["verdict"])  # other ranks have given up
        if not late and self._wait("request"):
            asked = self.store.get("request").decode()
            self._say("" if asked == self.request else _disagreement(first, asked, rank, self.request))
        elif not late:
            self._give_up()
        self._raise_unless_agreed()

    def meet(self, problem: str) -> None:
        self.store.set(f"arrived/{self.world.rank}", "")
        self._say(problem)
        self._raise_unless_agreed()

    def _say(self, problem: str) -> None:
        """Write this rank's problem or its consent, and wait for the verdict."""
        if problem:
            self._write(problem)
        elif self.store.add("alike", 1) == self.world.size:
            self._write(AGREED)
        if not self._wait("verdict"):
            self._give_up()

    def _raise_unless_agreed(self) -> None:
        verdict = self.store.get("verdict").decode()
        if verdict != AGREED:
            raise ParallelStateError(verdict)

    def _give_up(self) -> None:
        """Write which ranks are missing after a time-out, unless there is a verdict by now."""
        rank, seconds = self.world.rank, f"{self.world.timeout.total_seconds():g} s"
        # One rank looks for the missing ones, so that a large world does not make world x world queries.
        if self.store.add("overdue", 1) == 1:
            missing = [str(r) for r in self.world.members if not self.store.check([f"arrived/{r}"])]
            who = f"rank{'s' * (len(missing) > 1)} {', '.join(missing)}" if missing else "some rank"
            came = "did not call it" if missing else "called it too late"
            self._write(f"rank {rank} waited {seconds} in {self.request}: {who} {came}")
        elif not self._wait("verdict"):
            self._write(f"rank {rank} waited twice {seconds} in {self.request}")

    def _write(self, verdict: str) -> None:
        """Write the verdict, atomically and only if there is none yet: a late rank cannot change it."""
        self.store.compare_set("verdict", "", verdict)

    def _wait(self, key: str) -> bool:
        return are_set(self.store, [key], self.world.timeout)


def _disagreement(first: int, asked: str, rank: int, request: str) -> str:
    calls = quoted([asked, request])
    both = f"rank {first} asked for {calls[0]}, but rank {rank} asked for {calls[1]}"
    where, values = difference([asked, request])
    if not where:
        return f"ranks disagree: {both}"
    return (
        f"ranks disagree on {where}: rank {first} has {values[0]}, rank {rank} has {values[1]}; give all "
        f"ranks the same ({both})"
    )


def are_set(store: Store, keys: list[str], timeout: timedelta) -> bool:
    """Wait until all keys are set; return whether they were set in time."""
    try:
        store.wait(keys, timeout)
    except DistNetworkError:
        raise
    except RuntimeError:  # stores raise different errors for a time-out, such as DistStoreError
        return store.check(keys)
    return True
