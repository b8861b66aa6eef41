"""Times the ways to move rows between GPUs, and chooses the fastest: `choose`.

Under TPKERNELS_TRANSPORT=auto, the ranks time what is possible when a group first moves a shape, on the rows
of the call that waits for the choice, and with the product that hides its transfer:

    1 collective             and one product: always possible
    n collectives            each with a part of the product, where there is a product and n divides the ranks
    symmetric                where all ranks are on one machine and kernels compute: one kernel of ours, which
                             waits for rows or stores them; with each of its tiles
    the backend's sum        for sums, with TPKERNELS_BACKEND_SUMS=timed, which allows its order: one
                             collective, as NCCL's all-reduce in the switches of NVLink
    symmetric in n rounds    the same memory, rows pushed by copies: each part of the product by torch or by a
                             kernel of ours, as the autotuner says

In these cases nothing is timed, and collectives move the rows, as many as arithmetic says:

- a CUDA graph is captured, torch.compile traces, or TPKERNELS_TUNE=0
- TPKERNELS_BATCH_INVARIANT=1 or TPKERNELS_TP_INVARIANT: the way would depend on the batch that came first
- without overlap: one collective moves all
- beyond MOST_TIMED shapes of a group: lengths may change from batch to batch

None of this was run on a GPU yet.

Ways are collective, so no rank decides by itself (`WayChooser`): each decision is taken from what all have
told each other, and each rank runs each way equally often. A way that a rank cannot open, or that gives other
numbers there, is dropped on all ranks, and not tried again for the group. What was chosen without it stays
out of the file, as the next process may find it well. Before anybody waits for rows, all ranks have allocated
what a trial takes, and compiled its kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tpkernels.comm import tensor_parallel
from tpkernels.comm.agreement import offers_of_all
from tpkernels.comm.calls import Call, begin, handshake
from tpkernels.comm.groups import timeout_of
from tpkernels.comm.schedule import MOST_CHUNKS, pushed_chunks
from tpkernels.comm.tensor_parallel import Computing, Moved, TensorParallel
from tpkernels.comm.transports import select
from tpkernels.comm.transports.c10d import BackendSums, collectives_of, gather_small, rounds_for
from tpkernels.comm.transports.in_memory import Mailboxes
from tpkernels.comm.transports.rows import Gather, Terms, Transport
from tpkernels.comm.transports.symmetric import SymmetricExchange
from tpkernels.dispatch import backends, log
from tpkernels.dispatch.autotune import autotuner_on, why_not_now, winner
from tpkernels.dispatch.cache import Cache, Choice
from tpkernels.dispatch.candidates import dtype_class, multiplied_in_tf32, token_class
from tpkernels.dispatch.timing import Clock, CudaStream, StreamClock, is_quiet, rounds
from tpkernels.env import env_flag
from tpkernels.kernels import invariance
from tpkernels.kernels.matmul_tile import MatmulTile
from tpkernels.kernels.operands import DTYPES
from tpkernels.ops.tensor_parallel.flag_waits import FLAG_KERNELS, NO_TILE, Work, pairs_of, tiles_to_try

MOST_TIMED = 32  # a layer has about ten
ROUNDS = 15  # a number, and not a time: all ranks must run as often
MARGIN = 0.05  # of the usual way's time: what moves rows is shared with other jobs, and varies more
TOLERANCE = 1e-2  # of the norm: ways round at different places
TRIAL_SECONDS = 20.0  # until a rank that does not come is an error, while a way is tried
_NO_MEMORY = "out of memory", "memoryerror"  # in what an error says

Tell = Callable[[Sequence[str]], list[list[str]]]  # our texts -> those of each rank, in order


class Way(NamedTuple):
    """A way to move rows, and to compute the product that hides the transfer.

    rounds: collectives, or products through memory; 0: one kernel of ours waits for rows, or stores them
    tile: of that kernel; None: as it takes untold
    by_backend: the backend adds
    """

    rounds: int
    in_memory: bool = False
    tile: MatmulTile | None = None
    by_backend: bool = False

    @property
    def name(self) -> str:
        if self.by_backend:
            return "the backend's sum"
        plural = "s" * (self.rounds > 1)
        if not self.in_memory:
            return f"{self.rounds} collective{plural}"
        if self.rounds:
            return f"symmetric in {self.rounds} round{plural}"
        return "symmetric" if self.tile is None else f"symmetric {self.tile.name}"


def possible_ways(
    moved: Moved,
    ranks: int,
    usual: Way,
    tiles: Iterable[MatmulTile],
    *,
    in_memory: bool,
    by_backend: bool = False,
) -> list[Way]:
    """List the ways to move a matrix.

    usual: what is taken without timing
    tiles: of the kernel that waits or stores, besides the one that it takes untold
    by_backend: the backend may add, in an order of its own
    """
    most = MOST_CHUNKS if moved.width else 1
    in_rounds = [count for count in range(1, most + 1) if ranks % count == 0]
    ways = [usual]
    if not moved.to_all:  # over c10d arithmetic alone cuts an all-reduce
        ways += [Way(count) for count in in_rounds]
    if by_backend:
        ways.append(Way(1, by_backend=True))
    if in_memory:
        ways += [Way(0, True), *(Way(0, True, tile) for tile in tiles)]
        if moved.width or moved.reduces:  # a gather without a product waits for all rows in either way
            ways += [Way(count, True) for count in in_rounds]
    return list(dict.fromkeys(ways))


def _backend_may_add() -> bool:
    return tensor_parallel.backend_sums == "timed"


def key_of(moved: Moved, ranks: int, machines: int) -> str:
    """Return the line that names a transfer in files and logs.

    It has TF32, which `Moved` lacks: ranks may differ in it, and must choose together.
    """
    dtype = dtype_class(moved.dtype, multiplied_in_tf32(moved.dtype))
    sizes = f"{token_class(moved.rows)}x{moved.cols}x{moved.width}"
    how = f"{moved.how.removeprefix(' in ')} as " * bool(moved.how)
    who = " to all" * moved.to_all + " by whom is fastest" * (moved.reduces and _backend_may_add())
    return f"{moved.op} {moved.purpose}{who} {how}{dtype} {sizes} {ranks} ranks {machines} machines"


def choose(trial: Trial) -> Transport:
    """Choose the transport of a transfer, together with the other ranks of the group."""
    moved, group, exchanges = trial.moved, trial.group, trial.exchanges
    key = key_of(moved, group.size(), exchanges.machines)
    usual = Way(rounds_for(trial.like, moved.rows, moved.width, group.size()))
    if why := why_not_now(moved.device):  # no rank may talk now; all are in the same call
        log.choices.info("%s: %s (not timed now: %s)", key, usual.name, why)
        return trial.transport(usual)
    if len(exchanges.chosen) >= MOST_TIMED:
        return trial.transport(usual)

    def tell(texts: Sequence[str]) -> list[list[str]]:
        call = handshake(moved.op, f"ways of the {moved.purpose}", group)
        return offers_of_all(key, call, "", "", texts)

    chooser = WayChooser(
        key,
        trial,
        tell,
        clock_on(moved.device, trial.meet),
        cache_on(moved.device),
        exchanges.dropped,
        partial(is_quiet, moved.device),
    )
    way, choice = chooser.choose(trial.ways(usual), usual, _why_not_timed())
    log.choices.info("%s: %s", key, choice)
    chosen = exchanges.chosen[moved._replace(width=0)] = trial.transport(way)
    if isinstance(chosen, Mailboxes):
        chosen.exchange.timeout = timeout_of(group, moved.device)
    return chosen


def _announce(key: str, count: int) -> None:
    """Log what is chosen before it takes its time."""
    log.choices.info("%s: choosing among %d ways, %g s each at most", key, count, TRIAL_SECONDS)


def clock_on(device: torch.device, meet: Callable[[], None]) -> Clock:
    """Return a clock for one choice: its memory is not kept. meet: enqueues a meeting of the ranks"""
    return StreamClock(CudaStream(device), meet=meet)


def cache_on(device: torch.device) -> Cache:
    """Return the cache of choices, which kernels and ways share."""
    return autotuner_on(device).cache


def _why_not_timed() -> str:
    if not env_flag("TPKERNELS_TUNE", default=True):
        return "TPKERNELS_TUNE=0"
    return invariance.why_fixed()


class Trial:
    """Makes one call by each way, with the operands of the call that waits for the choice."""

    def __init__(
        self,
        computing: Computing,
        moved: Moved,
        like: Tensor,
        group: ProcessGroup,
        exchanges: select.Exchanges,
        work: object,
    ) -> None:
        """computing: who computes with what moves

        like: this rank's rows of a gather, or a tensor like the terms of a sum
        work: these terms; or the product of the rows, see `Work`
        """
        self._computing = computing
        self.moved, self.like, self.group, self.exchanges = moved, like, group, exchanges
        # sums alone are timed and compared: not every way computes what follows them
        self._terms = replace(work, after=None) if isinstance(work, Terms) else None
        self._work: Work | None = work if isinstance(work, tuple) and moved.width else None
        shape = moved.rows // group.size(), moved.cols
        self._key: select.Key = moved.purpose, shape, moved.dtype, moved.device
        self._shared = exchanges.find(self._key)  # memory in which other calls may be in flight
        self._tile_before = NO_TILE if self._shared is None else self._shared.tiles.get(moved.op, NO_TILE)
        self._no_memory = ""  # why it could not be opened

    def ways(self, usual: Way) -> list[Way]:
        """List the ways that are possible on this rank."""
        moved, of_group = self.moved, self.exchanges
        taken = moved.dtype in DTYPES or (moved.dtype == torch.int32 and not moved.reduces)
        may_open = self._shared is not None or of_group.has_room()
        in_memory = backends.backend != "torch" and taken and of_group.machines == 1 and may_open
        tiles = self._tiles() if in_memory else ()
        by_backend = _backend_may_add() and self._terms is not None and not self._terms.tree
        return possible_ways(
            moved, self.group.size(), usual, tiles, in_memory=in_memory, by_backend=by_backend
        )

    def _tiles(self) -> tuple[MatmulTile, ...]:
        """List tiles of the kernel that waits or stores, besides the one that it takes untold."""
        _, (rows, cols), dtype, _ = self._key
        chunk_rows = rows // pushed_chunks(rows, rows * cols * dtype.itemsize, self.group.size())
        if self._terms is not None:
            pairs = self._terms.pairs
            return tiles_to_try("linear", pairs, chunk_rows, waits=False) if self._pushes else ()
        if self._work is None or not dtype.is_floating_point:
            return ()
        kernel, weights, _ = self._work
        gathered = torch.empty(self.moved.rows, cols, dtype=dtype, device="meta")
        return tiles_to_try(kernel, pairs_of(kernel, gathered, weights), chunk_rows, waits=True)

    @property
    def _pushes(self) -> bool:
        return self._terms is not None and FLAG_KERNELS.pushes(self._terms, self.moved.dtype)

    @torch.no_grad()
    def open(self, way: Way) -> None:
        """Allocate what a way needs; an error drops it on all ranks. This may be collective."""
        if not way.in_memory:  # compute alone: a rank that lacks memory for a run says so before others wait
            rows = self.like.new_zeros(self.moved.rows, self.moved.cols)  # or slots
            if self._terms is not None:
                self._terms.at_once()
            elif self._work is not None:
                self._work[2](Gather(rows))
            return
        exchange = self._memory()
        exchange.timeout = timeout_of(self.group, self.moved.device)
        if way.rounds or self._shared is None:  # kernels that store might find a call in flight
            with exchange.rehearsing():
                self.run(way)
        if self._shared is None:  # else a wait of another call might run out
            exchange.timeout = min(exchange.timeout, TRIAL_SECONDS)

    @torch.no_grad()
    def run(self, way: Way) -> list[Tensor]:
        """Move rows, and return what is computed of them.

        But for words of fp8, which differ wholly where numbers differ by a rounding.
        """
        moved, transport = self.moved, self.transport(way)
        call = begin(moved.op, f"trial of the {moved.purpose}", self.group)
        if self._terms is not None and moved.to_all:
            return [self._sum_of_all(call, transport, self._terms)]
        if self._terms is not None:
            return [transport.reduce(call, self._terms, None, at_once=False).wait()]
        gathering = transport.gather(call, self.like, moved.rows, keeps=False, at_once=False)
        found = gathering.all() if self._work is None else self._work[2](gathering)
        return [tensor for tensor in _tensors(found) if tensor.is_floating_point()]

    def _sum_of_all(self, call: Call, transport: Transport, terms: Terms) -> Tensor:
        """Return the sum of all rows; one that memory has reduced is gathered by a collective."""
        if isinstance(transport, BackendSums):
            return transport.all_reduce(call, terms, None).wait()
        if isinstance(transport, Mailboxes):
            reduced = transport.reduce(call, terms, None, at_once=False).wait()
            gather = begin(call.op, "trial of the gather of sums", self.group)
            return collectives_of(1).gather(gather, reduced, terms.rows, keeps=False, at_once=True).all()
        tp = TensorParallel(self.group, computing=self._computing, in_memory=False)
        return tp.all_reduce(call.op, terms).wait()

    def meet(self) -> None:
        """Have this rank's stream wait for those of all ranks."""
        call = begin(self.moved.op, f"meeting before a trial of the {self.moved.purpose}", self.group)
        gather_small(call, self.like.new_zeros(1))

    def transport(self, way: Way) -> Transport:
        """Return the transport of a way that is open, whose kernel takes the tile of the way."""
        if way.by_backend:
            return BackendSums()
        if not way.in_memory:
            return collectives_of(way.rounds, FLAG_KERNELS if FLAG_KERNELS.adds(self.like) else None)
        exchange = self._memory()
        kernel = "linear" if self._work is None else self._work[0]
        exchange.tiles[self.moved.op] = NO_TILE if way.tile is None else (kernel, way.tile)
        return Mailboxes(exchange, FLAG_KERNELS, way.rounds, pushes=not way.rounds and self._pushes)

    def _memory(self) -> SymmetricExchange:
        """Open the memory, if it is not; all ranks do this at once."""
        if self._no_memory:  # on all ranks, and no other way through it can do better
            raise RuntimeError(self._no_memory)
        exchange = self.exchanges.find(self._key)
        if exchange is None:
            try:
                exchange = self.exchanges.open("symmetric", self.moved.op, self._key, self.group)
            except Exception as error:
                self._no_memory = str(error)
                raise
        assert isinstance(exchange, SymmetricExchange), "no other memory is of GPUs"
        return exchange

    def close(self) -> None:
        """Close the memory that was opened."""
        if self._shared is None:
            self.exchanges.close_one(self._key)
        else:
            self._shared.tiles[self.moved.op] = self._tile_before


def _tensors(found: object) -> list[Tensor]:
    """List the tensors of a result, which may be in sequences."""
    if isinstance(found, list | tuple):
        return [tensor for each in found for tensor in _tensors(each)]
    return [found] if isinstance(found, Tensor) else []


@dataclass(frozen=True)
class WayChooser:
    """Chooses a way for the ranks of one group, from the first of these that exists:

    1. what the ranks have in their caches, if all have the same
    2. timing now: each rank times each way, the slowest rank's time counts, and the fastest way wins
    3. the default, where a rank may not time
    """

    key: str  # of what is moved
    trial: Trial
    tell: Tell
    clock: Clock
    cache: Cache
    dropped: dict[str, str]  # ways that failed in choices of the group, and why
    is_quiet: Callable[[], bool] = lambda: True  # waits until nothing is in flight on this rank's GPU

    def choose(self, ways: Sequence[Way], default: Way, why_not: str = "") -> tuple[Way, Choice]:
        """Choose a way, and say why; all ranks call this at once.

        Of memory only what the way takes is open afterwards.

        default: one of `ways`
        why_not: why this rank may not time now
        """
        cached = self.cache.get(self.key)
        if cached and cached.company and not why_not:  # timed beside other work: it is made again
            cached = None
        ours = [default.name, cached.name if cached else "", why_not, ",".join(way.name for way in ways)]
        told = self.tell(ours)
        offered = [set(names.split(",")) for *_, names in told]
        defaults = [name for name, *_ in told]
        # on all ranks the same in one order, as what was dropped is
        possible = {
            way.name: way
            for way in sorted(ways, key=lambda way: way.name)
            if all(way.name in names for names in offered)
            and (way.name in defaults or way.name not in self.dropped)
        }
        # defaults may differ, as sizes of weight shards may: the first that is possible everywhere
        usual = possible[next((name for name in defaults if name in possible), min(possible))]
        kept = {name for _, name, _, _ in told}
        if cached and kept == {cached.name} and cached.name in possible:
            way = possible[cached.name]
            if why := self._drops(way):
                return usual, Choice(usual.name, source=f"not timed: {why}")
            return way, replace(cached, source="cached")
        for rank, (_, _, why, _) in enumerate(told):
            if why:
                return usual, Choice(usual.name, source=f"not timed: rank {rank}: {why}")
        return self._timed(list(possible.values()), usual)

    def _timed(self, possible: Sequence[Way], usual: Way) -> tuple[Way, Choice]:
        if len(possible) == 1:
            return usual, Choice(usual.name, source="only one")
        _announce(self.key, len(possible))
        if why := self._drops(usual):
            return usual, Choice(usual.name, source=f"not timed: {why}")
        expected = self.trial.run(usual)
        sound, untried = [usual], [way for way in possible if way is not usual]
        complete = not self.dropped
        while untried:
            way = untried.pop(0)
            if not self._drops(way, expected):
                sound.append(way)
                continue
            complete = False
            if way.in_memory:  # which was closed: it may hold half of a call
                untried = [each for each in sound if each.in_memory] + untried
                sound = [each for each in sound if not each.in_memory]
        if len(sound) == 1:
            return usual, Choice(usual.name, source="only one: no other works")
        milliseconds, company = self._slowest(sound)
        name = winner(milliseconds, usual.name, MARGIN)
        (chosen,) = (way for way in sound if way.name == name)
        if not chosen.in_memory:
            self.trial.close()
        choice = Choice(name, milliseconds, company=company)
        if complete:  # else the next process may choose from more
            self.cache.put(self.key, choice)
        return chosen, choice

    def _drops(self, way: Way, expected: Sequence[Tensor] | None = None) -> str:
        """Open a way; return why it is dropped, the same on all ranks, or "".

        expected: results to compare those of a run with; None: it is not run
        """
        problem = ""
        try:
            self.trial.open(way)
        except Exception as error:  # whatever it is, the others wait to be told
            problem = f"{type(error).__name__}: {error}"
        problem = self._first_problem(problem)  # from here on all ranks are ready
        if not problem and expected is not None:
            try:
                problem = mismatch(self.trial.run(way), expected)
            except Exception as error:
                if not way.in_memory:  # another rank would take for its own what is still in flight
                    raise
                problem = f"{type(error).__name__}: {error}"
            problem = self._first_problem(problem)
        if problem:
            if way.in_memory:
                self.trial.close()
            if not any(words in problem.lower() for words in _NO_MEMORY):  # another shape may have enough
                self.dropped[way.name] = problem
            log.warnings.warning("%s dropped for %s: %s", way.name, self.key, problem)
        return problem

    def _first_problem(self, ours: str) -> str:
        """Return the problem of the first rank that has one, or ""."""
        problems = enumerate(self.tell([ours]))
        return next((f"rank {rank}: {theirs}" for rank, (theirs,) in problems if theirs), "")

    def _slowest(self, ways: Sequence[Way]) -> tuple[dict[str, float], str]:
        """Time each way; return its median on the slowest rank, and what else ran on a rank, or ""."""
        runs = {way.name: partial(self.trial.run, way) for way in ways}
        medians, company = rounds(
            list(runs), lambda name: max(self.clock(name, runs[name])), is_quiet=self.is_quiet, exactly=ROUNDS
        )
        ours = " ".join(f"{milliseconds:.6g}" for milliseconds in medians.values())
        told = self.tell([ours, company])
        by_rank = [[float(word) for word in times.split()] for times, _ in told]
        beside = next((f"{theirs} on rank {rank}" for rank, (_, theirs) in enumerate(told) if theirs), "")
        slowest = {name: max(times) for name, times in zip(runs, zip(*by_rank, strict=True), strict=True)}
        return slowest, beside


def mismatch(found: Sequence[Tensor], expected: Sequence[Tensor]) -> str:
    """Return in words how far results are off, or "" if they are right."""
    for ours, theirs in zip(found, expected, strict=True):
        if ours.shape != theirs.shape:
            return f"its result is {tuple(ours.shape)}, expected {tuple(theirs.shape)}"
        # the caller's own numbers may overflow, in the first steps of fp16: what is left is compared
        there = theirs.isfinite()
        wanted = theirs.float().where(there, 0.0)
        error, size = float((ours.float().where(there, 0.0) - wanted).norm()), float(wanted.norm())
        if not error <= TOLERANCE * size:  # a NaN is not
            return f"its result is off by {error:.1e} of {size:.1e}"
    return ""
