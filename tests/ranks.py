"""Real ranks for tests: processes that live for the whole run, and a new gloo group for every call.

    def sum_of_ranks() -> float:  # at module level, because it travels by name
        total = torch.tensor(float(dist.get_rank()))
        dist.all_reduce(total)
        return total.item()

    def test_sum_of_ranks(ranks4: RankPool) -> None:
        assert ranks4.run(sum_of_ranks) == [6.0] * 4

A process takes seconds to start, since it imports torch: it is kept, or forked from one that has done so.
A process group takes milliseconds: each call gets its own, so a collective left half done cannot hurt the
next test. Ranks that die or hang are reported, killed, and replaced by the next call.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TextIO, TypeVar, cast
from unittest.mock import patch

import torch
import torch.distributed as dist

from tests.patience import patient
from tpkernels.comm import schedule
from tpkernels.training.launch import loopback_store

T = TypeVar("T")

LEAST_BYTES = schedule.LEAST_BYTES

START_SECONDS = 120.0  # four imports of torch on a loaded two-core machine, with room
# Below the time-out of a call: a lone collective fails with a traceback.
COLLECTIVE_SECONDS = float(round(patient(60.0)))
JOIN_SECONDS = LEAVE_SECONDS = COLLECTIVE_SECONDS + 5.0  # may wait for a collective, or a store, to time out
GRACE_SECONDS = 20.0  # gloo tells the peers of a failed rank within a second, flags within a time-out
EXIT_SECONDS = 10.0  # an upper bound: a signal ends a rank within milliseconds

FORKED, SPAWNED, IN_TURN = "forkserver", "spawn", "in turn"
PRELOADED = ["tests.ranks", "torch._dynamo", "tpkernels.models.gpt", "tpkernels.interop.parallelize"]
multiprocessing.set_forkserver_preload(PRELOADED)
_other_server = forkserver.ForkServer()
_other_server.set_forkserver_preload(PRELOADED)


class RankFailure(RuntimeError):
    """Some ranks raised, died or hung. The message tells each one's story, the likely cause first."""

    def __init__(self, message: str, exceptions: dict[int, BaseException | None]) -> None:
        super().__init__(message)
        self.exceptions = exceptions  # of the ranks that failed; None: died, hung, or could not be pickled


@dataclass(frozen=True)
class Returned:
    result: bytes  # pickled


@dataclass(frozen=True)
class Raised:
    at: float  # of the monotonic clock, which all processes share: a cause sorts before its consequences
    summary: str
    traceback: str
    exception: bytes | None  # pickled, where it can be


@dataclass(frozen=True)
class Died:
    exitcode: int | None


Answer = Returned | Raised | Died


def attempt(function: Callable[..., Any], *args: Any) -> Returned | Raised:
    try:
        return Returned(pickle.dumps(function(*args)))
    except BaseException as error:  # SystemExit too: a rank answers every call
        at, exception = time.monotonic(), None
        with suppress(Exception):
            exception = pickle.dumps(error)
        summary = "".join(traceback.format_exception_only(error)).strip()
        return Raised(at, summary, "".join(traceback.format_exception(error)), exception)


def all_alive(answers: Sequence[Answer | None]) -> bool:
    return all(isinstance(answer, Returned | Raised) for answer in answers)


def failure(name: str, answers: Sequence[Answer | None], stacks: Sequence[str]) -> RankFailure:
    stories = []
    exceptions: dict[int, BaseException | None] = {}
    for rank in sorted(range(len(answers)), key=lambda rank: _order(answers[rank])):
        answer, details = answers[rank], stacks[rank]
        match answer:
            case Raised():
                summary, details = answer.summary, answer.traceback
            case Died():
                summary = _end(answer.exitcode)
            case Returned():
                summary = "returned"
            case None:
                summary = "no answer in time"
        stories.append(f"rank {rank}: {summary}\n{textwrap.indent(details, '    ')}")
        if not isinstance(answer, Returned):
            exceptions[rank] = _exception(answer)
    return RankFailure(
        "\n".join([f"{len(exceptions)} of {len(answers)} ranks failed: {name}", *stories]), exceptions
    )


def _order(answer: Answer | None) -> tuple[int, float]:
    """The likely cause first: deaths, exceptions by time, ranks that hang, ranks that are well."""
    match answer:
        case Died():
            return 0, 0.0
        case Raised():
            return 1, answer.at
        case None:
            return 2, 0.0
        case Returned():
            return 3, 0.0


def _end(exitcode: int | None) -> str:
    if exitcode is None:
        return "closed its pipe"
    if exitcode < 0:
        return f"killed by signal {-exitcode} ({signal.strsignal(-exitcode)})"
    return f"exited with code {exitcode}"


def _exception(answer: Answer | None) -> BaseException | None:
    if isinstance(answer, Raised) and answer.exception is not None:
        with suppress(Exception):  # many exceptions with arguments of their own can be pickled only one way
            return cast("BaseException", pickle.loads(answer.exception))
    return None


class RankPool:
    """`world_size` ranks, started by the first call."""

    def __init__(
        self,
        world_size: int,
        start: str = FORKED,
        enter: Callable[[], None] | None = None,
        *,
        within: RankPool | None = None,
    ) -> None:
        """start: ranks that are SPAWNED order sets each in its own way, as those of users do
        enter: called first in each rank, before it has threads; ranks meet in a file then, not over a network
        within: a larger pool, whose first ranks these are; it is the one to close
        """
        self.world_size = world_size
        self._within = within
        self._start = SPAWNED if torch.cuda.is_available() else start  # a GPU may not outlive a fork
        self._enter = enter
        self._processes: _Processes | None = None
        atexit.register(self.close)

    def run(self, function: Callable[..., T], *args: Any, timeout: float = 180.0) -> list[T]:
        """Call `function(*args)` on every rank; the results in rank order.

        function: importable by name; asks torch.distributed for its rank
        timeout: seconds of the function until the ranks are reported with their stacks, and killed
        """
        __tracebackhide__ = True  # pytest shows the line of the test instead
        return self.run_each(function, [args] * self.world_size, timeout=timeout)

    def run_each(
        self, function: Callable[..., T], args_of_rank: Sequence[Sequence[Any]], *, timeout: float = 180.0
    ) -> list[T]:
        """Call `function(*args_of_rank[rank])` on every rank; the results in rank order."""
        __tracebackhide__ = True
        if len(args_of_rank) != self.world_size:
            raise ValueError(f"expected arguments for {self.world_size} ranks, got {len(args_of_rank)}")
        calls = [_pickled_call(function, args) for args in args_of_rank]
        return [pickle.loads(result) for result in self._call(calls, timeout, _name(function))]

    def _call(self, calls: Sequence[bytes], timeout: float, name: str) -> list[bytes]:
        """calls: of the first ranks; the others are left alone"""
        __tracebackhide__ = True
        if self._within is not None:
            return self._within._call(calls, timeout, name)
        self.start()
        assert self._processes is not None
        try:
            return self._processes.call(calls, timeout, name)
        finally:  # also after Ctrl-C: what the ranks are doing then is not known
            if not self._processes.idle:
                self._processes.kill()
                self._processes = None

    def start(self) -> list[int]:
        """Their process ids; a call starts them, too."""
        if self._within is not None:
            return self._within.start()[: self.world_size]
        if self._processes is None:
            self._processes = _Processes(self.world_size, self._start, self._enter)
        return self._processes.pids

    @property
    def is_running(self) -> bool:
        return (self._within or self)._processes is not None

    def close(self) -> None:
        """End all ranks. A later call would start new ones."""
        if self._processes is not None:
            self._processes.kill()
            self._processes = None
        atexit.unregister(self.close)

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def join_world(backend: str, store: dist.Store, rank: int, world_size: int) -> None:
    """Initialise the default process group."""
    excepthook = sys.excepthook
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=COLLECTIVE_SECONDS)
    )
    sys.excepthook = excepthook  # torch wraps it again each time; a thousand layers are a RecursionError


def leave_world() -> None:
    """Undo what a test set up in this process: model-parallel state, then all process groups."""
    initialize = sys.modules.get("tpkernels.groups.initialize")  # never imported: nothing to undo
    try:
        if initialize is not None:
            initialize.destroy_model_parallel()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        schedule.LEAST_BYTES = LEAST_BYTES  # tests set it, so that even tiny shards are cut
        forget_groups()


def forget_groups() -> None:
    """Have torch drop what it remembers of destroyed groups: of each that it holds, gloo's threads go on."""
    torch._dynamo.reset()
    if "torch.distributed.tensor" in sys.modules:  # DTensor remembers meshes, with their groups
        tensor = sys.modules["torch.distributed.tensor"]
        import_module("torch.distributed.tensor.debug")._clear_sharding_prop_cache()
        tensor._redistribute.clear_redistribute_planner_cache()
        tensor._redistribute._gen_transform_infos.cache_clear()
        tensor._collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()


@dataclass(frozen=True)
class _Rank:
    """The parent's end of one rank."""

    process: BaseProcess
    connection: Connection  # calls go out, answers come back
    stacks: TextIO  # where faulthandler of the rank writes, when the rank crashes or gets SIGUSR1

    def answer(self) -> Answer:
        try:
            return cast("Answer", self.connection.recv())
        except (EOFError, OSError):
            self.process.join(EXIT_SECONDS)
            return Died(self.process.exitcode)


class _Processes:
    """One set of processes. Once it is not `idle` after a call, it is of no more use."""

    def __init__(self, world_size: int, start: str, enter: Callable[[], None] | None) -> None:
        context: Any = multiprocessing.get_context(FORKED if start == IN_TURN else start)
        self._folder = tempfile.TemporaryDirectory()
        self._store = loopback_store() if enter is None else None  # hosted here: it outlives any rank
        meeting = Path(self._folder.name, "store") if self._store is None else self._store.port
        lifeline, self._lifeline = context.Pipe(duplex=False)
        self._ranks: list[_Rank] = []
        self._numbers = itertools.count()
        self.idle = False
        try:
            for server in (forkserver, _other_server) if start == IN_TURN else ():
                server.ensure_running()  # both import torch at once
            for rank in range(world_size):
                stacks = Path(self._folder.name, f"{rank}.txt")
                reader = stacks.open("w+")
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_serve,
                    args=(rank, world_size, meeting, enter, theirs, lifeline, stacks),
                    name=f"rank {rank}",
                    daemon=True,
                )
                with _server_of(rank if start == IN_TURN else 0):
                    process.start()
                self._ranks.append(_Rank(process, ours, reader))
                theirs.close()  # the rank now holds the only copy: its death is an end of file
            lifeline.close()
            self._results("starting", self._listen(self._ranks, START_SECONDS))
            self.idle = True
        except BaseException:
            self.kill()
            raise

    @property
    def pids(self) -> list[int]:
        return [rank.process.pid or 0 for rank in self._ranks]

    def call(self, calls: Sequence[bytes], timeout: float, name: str) -> list[bytes]:
        __tracebackhide__ = True
        self.idle = False
        number, called = next(self._numbers), self._ranks[: len(calls)]
        for rank, call in zip(called, calls, strict=True):
            with suppress(OSError):  # it died in the meantime, which is found and reported below
                rank.connection.send((number, len(calls), call))
        self._results(f"joining the world for {name}", self._listen(called, JOIN_SECONDS))
        answers = self._listen(called, timeout)
        if all_alive(answers):
            partings = self._listen(called, LEAVE_SECONDS)
            self.idle = all_alive(partings)
            answers = [
                answer if isinstance(answer, Raised) or isinstance(parting, Returned) else parting
                for answer, parting in zip(answers, partings, strict=True)
            ]
        return self._results(name, answers)

    def kill(self) -> None:
        """End them: also the way to end idle ranks, which have nothing to lose, and would take longer."""
        for rank in self._ranks:
            rank.process.kill()
        self._join()
        for rank in self._ranks:
            rank.connection.close()
            rank.stacks.close()
        self._lifeline.close()
        self._folder.cleanup()

    def _join(self) -> None:
        deadline = time.monotonic() + patient(EXIT_SECONDS)
        for rank in self._ranks:
            rank.process.join(max(0.0, deadline - time.monotonic()))

    def _results(self, name: str, answers: list[Answer | None]) -> list[bytes]:
        __tracebackhide__ = True
        results = [answer.result for answer in answers if isinstance(answer, Returned)]
        if len(results) < len(answers):
            stacks = [""] * len(self._ranks) if self.idle else self._last_stacks()
            raise failure(name, answers, stacks[: len(answers)])
        return results

    def _listen(self, ranks: Sequence[_Rank], seconds: float) -> list[Answer | None]:
        """One answer of each rank. A death shows at once: it ends the rank's pipe, as nobody else has it."""
        deadline = time.monotonic() + patient(seconds)
        answers: list[Answer | None] = [None] * len(ranks)
        while silent := {number: rank for number, rank in enumerate(ranks) if answers[number] is None}:
            left = max(0.0, deadline - time.monotonic())
            speaking = wait([rank.connection for rank in silent.values()], left)
            if not speaking:
                break
            for number, rank in silent.items():
                if rank.connection in speaking:
                    answer = answers[number] = rank.answer()
                    if not isinstance(answer, Returned):
                        deadline = min(deadline, time.monotonic() + patient(GRACE_SECONDS))
        return answers

    def _last_stacks(self) -> list[str]:
        """Where each rank stands, or stood when it crashed. Ends them all."""
        for rank in self._ranks:
            if rank.process.is_alive() and rank.process.pid is not None:
                os.kill(rank.process.pid, signal.SIGUSR1)
        self._join()
        return [_without_lifeline(rank.stacks.read()) for rank in self._ranks]


def _server_of(rank: int) -> AbstractContextManager[object]:
    """Odd ranks are forked by the other server."""
    if rank % 2 == 0:
        return nullcontext()
    return patch.object(forkserver, "connect_to_new_process", _other_server.connect_to_new_process)


def _serve(
    rank: int,
    world_size: int,
    meeting: int | Path,
    enter: Callable[[], None] | None,
    connection: Connection,
    lifeline: Connection,
    stacks: Path,
) -> None:
    """The whole life of a rank. meeting: the port of a store, or its file"""
    if enter is not None:
        entered = attempt(enter)
        if isinstance(entered, Raised):
            connection.send(entered)
            return
    stacks_file = stacks.open("a")
    faulthandler.enable(stacks_file)
    # Chained to the default action, death: once the process has ended, its stacks are complete.
    faulthandler.register(signal.SIGUSR1, stacks_file, chain=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all of us; the parent deals with it
    threading.Thread(target=_exit_with_parent, args=(lifeline,), daemon=True).start()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the machine's own name need not resolve
    torch.set_num_threads(1)
    patience = timedelta(seconds=COLLECTIVE_SECONDS)
    store: dist.Store = (
        dist.FileStore(str(meeting), world_size)
        if isinstance(meeting, Path)
        else dist.TCPStore("127.0.0.1", meeting, is_master=False, timeout=patience)
    )
    store.set_timeout(patience)
    connection.send(Returned(b""))  # ready
    while True:
        try:
            number, world_size, call = connection.recv()
        except EOFError:  # the parent is gone
            return
        place = dist.PrefixStore(f"call {number}", store)
        join_world("gloo", place, rank, world_size)
        _meet(place, "arrival", world_size)  # a rank that left now would break connections still being made
        connection.send(Returned(b""))  # from now on time counts
        torch.manual_seed(7000 + rank)  # whatever ran before; and ranks differ, as those that nobody seeds
        if streams := sys.modules.get("tpkernels.groups.random"):
            streams.get_rng_tracker().reset()  # a call before may have had fewer ranks
        answer = attempt(_called, call)
        sys.stdout.flush()  # into the output of this test, not of a later one
        connection.send(answer)
        if isinstance(answer, Raised):
            place.set("departure", "now")  # broken connections are what waits of the others need
        _meet(place, "departure", world_size)
        connection.send(attempt(leave_world))


def _meet(store: dist.Store, event: str, world_size: int) -> None:
    """Wait until every rank is here, or somebody sets the event."""
    if store.add(f"{event} count", 1) == world_size:
        store.set(event, "now")
    store.wait([event], timedelta(days=1))  # the parent decides when it has been too long


def _exit_with_parent(lifeline: Connection) -> None:
    """Nothing is ever sent: the pipe ends with the parent, even if that is killed. Then nobody needs us."""
    with suppress(EOFError, OSError):
        lifeline.recv_bytes()
    os._exit(1)


def _without_lifeline(stacks: str) -> str:
    return "\n\n".join(stack for stack in stacks.split("\n\n") if _exit_with_parent.__name__ not in stack)


def _called(call: bytes) -> Any:
    function, args = pickle.loads(call)
    gc.collect()
    gc.freeze()  # what is imported: `parallelize` looks at all other objects, for wrappers and optimizers
    return function(*args)


def _pickled_call(function: Callable[..., Any], args: Sequence[Any]) -> bytes:
    # Not Connection.send, whose pickler puts tensors into shared memory that dies with the sender.
    try:
        return pickle.dumps((function, tuple(args)))
    except Exception as error:
        problem = f"{_name(function)} and its arguments cannot be sent to ranks: {error}"
        raise TypeError(f"{problem}; expected a function at module level, and what pickle takes") from error


def _name(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{getattr(function, '__qualname__', repr(function))}"
