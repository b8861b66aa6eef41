"""Times the ways to move rows between GPUs, and chooses the fastest: `choose`.

Under TPKERNELS_TRANSPORT=auto, the ranks time what is possible when a group first moves a shape, on scratch
and with the product that hides the transfer:

    1 collective             and one product: always possible
    n collectives            each with a part of the product, where there is a product and n divides the ranks
    symmetric                where all ranks are on one machine and kernels compute: one kernel of ours, which
                             waits for rows or stores them; with each of its tiles
    symmetric in n rounds    the same memory, rows pushed by copies: each part of the product by torch or by a
                             kernel of ours, as the chooser says

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

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tpkernels.comm.agreement import offers_of_all
from tpkernels.comm.calls import Call, begin, handshake
from tpkernels.comm.groups import timeout_of
from tpkernels.comm.schedule import MOST_CHUNKS, pushed_chunks
from tpkernels.comm.tensor_parallel import Moved
from tpkernels.comm.transports import select
from tpkernels.comm.transports.c10d import Collectives, collectives_of, rounds_for
from tpkernels.comm.transports.in_memory import Mailboxes
from tpkernels.comm.transports.rows import Terms, Transport
from tpkernels.comm.transports.symmetric import SymmetricExchange
from tpkernels.dispatch import backends, log
from tpkernels.dispatch.cache import Cache, Choice
from tpkernels.dispatch.chooser import Decision, chooser_on, obstacle, winner
from tpkernels.dispatch.problem import dtype_class, multiplied_in_tf32, token_class
from tpkernels.dispatch.timing import Clock, cuda_clock, rounds
from tpkernels.env import env_flag
from tpkernels.kernels import invariance
from tpkernels.kernels.matmul_tile import MatmulTile
from tpkernels.kernels.operands import DTYPES
from tpkernels.ops.matmul import PLAIN, Plain
from tpkernels.ops.tensor_parallel.flag_waits import FLAG_KERNELS, tiles_to_try

MOST_TIMED = 32  # a layer has about ten
ROUNDS = 7  # a number, and not a time: all ranks must run as often
TOLERANCE = 1e-2  # of the norm: ways round at different places
TRIAL_SECONDS = 20.0  # until a rank that does not come is an error, while a way is tried
MEMORY = "symmetric"
_NO_MEMORY = "out of memory", "memoryerror"  # in what an error says

WayRun = Callable[[], Tensor]
Tell = Callable[[Sequence[str]], list[list[str]]]  # our texts -> those of each rank, in order


def key_of(moved: Moved, ranks: int, machines: int) -> str:
    """Return the line that names a transfer in files and logs.

    It has TF32, which `Moved` lacks: ranks may differ in it, and must choose together.
    """
    dtype = dtype_class(moved.dtype, multiplied_in_tf32(moved.dtype))
    sizes = f"{token_class(moved.rows)}x{moved.cols}x{moved.width}"
    how = f"{moved.how.removeprefix(' in ')} as " * bool(moved.how)
    return f"{moved.op} {moved.purpose} {how}{dtype} {sizes} {ranks} ranks {machines} machines"


def choose(
    moved: Moved, like: Tensor, group: ProcessGroup, exchanges: select.Exchanges, work: object
) -> Transport:
    """Choose the transport of a transfer, together with the other ranks of the group.

    work: the terms of a sum, or the strategy that multiplies gathered rows, and features of these
    """
    key = key_of(moved, group.size(), exchanges.machines)
    usual = _collectives(rounds_for(like, moved.rows, moved.width, group.size()), like)
    if why := obstacle(moved.device):  # no rank may talk now; all are in the same call
        log.choices.info("%s: %s (not timed now: %s)", key, _name(usual), why)
        return usual
    if len(exchanges.chosen) >= MOST_TIMED:
        return usual

    def tell(texts: Sequence[str]) -> list[list[str]]:
        call = handshake(moved.op, f"ways of the {moved.purpose}", group)
        return offers_of_all(key, call, "", "", texts)

    ways = _Ways(moved, group, exchanges, work)
    chooser = WayChooser(tell, cuda_clock(moved.device), cache_on(moved.device), exchanges.dropped)
    decision = chooser.choose(key, ways.possible(usual), _name(usual), _why_not_timed())
    log.choices.info("%s", decision)
    chosen = exchanges.chosen[moved._replace(width=0)] = ways.transports[decision.candidate.name]
    if isinstance(chosen, Mailboxes):
        chosen.exchange.timeout = timeout_of(group, moved.device)
        chosen.exchange.tiles[moved.op] = ways.tiles[decision.candidate.name]
    return chosen


def may_choose(device: torch.device) -> bool:
    return not obstacle(device)


def _collectives(count: int, like: Tensor) -> Collectives:
    return collectives_of(count, FLAG_KERNELS if FLAG_KERNELS.adds(like) else None)


def _name(transport: Collectives) -> str:
    return f"{transport.rounds} collective{'s' * (transport.rounds > 1)}"


def _in_rounds(rounds: int) -> str:
    return f"{MEMORY} in {rounds} round{'s' * (rounds > 1)}"


def cache_on(device: torch.device) -> Cache:
    """Return the cache of choices, which kernels and ways share."""
    return chooser_on(device).cache


def _why_not_timed() -> str:
    if not env_flag("TPKERNELS_TUNE", default=True):
        return "TPKERNELS_TUNE=0"
    return invariance.why_fixed()


class _Ways:
    """The ways to move one shape, each a function that runs on the same scratch tensors."""

    def __init__(self, moved: Moved, group: ProcessGroup, exchanges: select.Exchanges, work: object) -> None:
        self._moved, self._group, self._of_group = moved, group, exchanges
        self._terms = work if isinstance(work, Terms) else None
        self._product: tuple[Plain, int] = work if isinstance(work, tuple) else (PLAIN, moved.cols)
        self._shape = moved.rows // group.size(), moved.cols
        self._key: select.Key = moved.purpose, self._shape, moved.dtype, moved.device
        self._shared = exchanges.find(self._key)  # with a choice for a product of another width
        self._holding: set[str] = set()  # ways that have the memory open
        self._no_memory = ""  # why it could not be opened
        self.transports: dict[str, Transport] = {}  # by way; of memory once it is open
        self.tiles: dict[str, MatmulTile | None] = {}  # likewise, of kernels that wait or store

    def possible(self, usual: Collectives) -> list[Way]:
        """List the ways. usual: what is taken without timing"""
        moved, sums = self._moved, self._terms is not None
        most = MOST_CHUNKS if moved.width else 1
        rounds = [n for n in range(1, most + 1) if self._group.size() % n == 0]
        by_c10d = [usual, *(_collectives(count, self._like) for count in rounds)]
        self.transports = {_name(transport): transport for transport in by_c10d}
        ways = [
            Way(name, partial(self._open_c10d, transport), reserve=self._reserve)
            for name, transport in self.transports.items()
        ]
        taken = moved.dtype in DTYPES or (moved.dtype == torch.int32 and not sums)
        kernels_wait = backends.backend != "torch" and taken
        may_open = self._shared is not None or self._of_group.has_room()
        if kernels_wait and self._of_group.machines == 1 and may_open:
            # a gather without a product waits for all rows in either way
            in_rounds = rounds if moved.width or sums else []
            in_memory: list[tuple[str, int, MatmulTile | None]] = [(MEMORY, 0, None)]
            in_memory += [(_in_rounds(count), count, None) for count in in_rounds]
            in_memory += [(f"{MEMORY} {tile.name}", 0, tile) for tile in self._tiles()]
            for name, count, tile in in_memory:
                opens, closes = (
                    partial(self._open_memory, name, count, tile),
                    partial(self._close_memory, name),
                )
                ways.append(Way(name, opens, closes, recovers=True, shares=MEMORY))
        return ways

    @cached_property
    def _like(self) -> Tensor:
        return torch.empty(0, dtype=self._moved.dtype, device=self._moved.device)

    def _tiles(self) -> tuple[MatmulTile, ...]:
        """List tiles of the kernel that waits or stores, besides the one that it takes untold."""
        size, terms = self._moved.dtype.itemsize, self._terms
        (rows, cols), ranks = self._shape, self._group.size()
        chunk_rows = rows // pushed_chunks(rows, rows * cols * size, ranks)
        if terms is not None:
            if not FLAG_KERNELS.pushes(terms, self._moved.dtype):
                return ()
            return tiles_to_try(terms.pairs, chunk_rows, waits=False)
        if not self._moved.width or self._product[0].recipe:
            return ()
        gathered = torch.empty(self._moved.rows, cols, dtype=self._moved.dtype, device="meta")
        return tiles_to_try([(gathered, self._scratch[1])], chunk_rows, waits=True)

    def _open_c10d(self, transport: Transport) -> WayRun:
        return partial(self._moving, transport)

    def _reserve(self) -> None:
        """Allocate the memory of a run, and free it: a rank that lacks it says so before others wait."""
        rows, cols, like = self._moved.rows, self._moved.cols, self._like
        held = [like.new_empty(rows, width) for width in (cols, cols, self._moved.width)]
        del held  # all rows, and the slots or terms that they came from; a product

    def _open_memory(self, name: str, rounds: int, tile: MatmulTile | None) -> WayRun:
        """Open the way of that many rounds; 0: of a kernel that waits, or stores.

        tile: of that kernel; None: as it takes untold
        """
        exchange = self._memory()
        self._holding.add(name)
        terms = self._terms
        pushes = not rounds and terms is not None and FLAG_KERNELS.pushes(terms, self._moved.dtype)
        way = self.transports[name] = Mailboxes(exchange, FLAG_KERNELS, rounds, pushes=pushes)
        exchange.timeout = timeout_of(self._group, self._moved.device)
        if rounds or self._shared is None:  # kernels that store might find a call in flight
            with exchange.rehearsing(), self._taking(exchange, tile):
                self._moving(way)
        if self._shared is None:  # else a wait that runs out would be one of calls in earnest
            exchange.timeout = min(exchange.timeout, TRIAL_SECONDS)

        def run() -> Tensor:
            with self._taking(exchange, tile):
                return self._moving(way)

        self.tiles[name] = tile
        return run

    @contextmanager
    def _taking(self, exchange: SymmetricExchange, tile: MatmulTile | None) -> Iterator[None]:
        """Have kernels of the operator take this tile meanwhile."""
        before, exchange.tiles[self._moved.op] = exchange.tiles.get(self._moved.op), tile
        try:
            yield
        finally:
            exchange.tiles[self._moved.op] = before

    def _memory(self) -> SymmetricExchange:
        """Open the memory, if it is not; all ranks do this at once."""
        if self._no_memory:  # on all ranks, and no other way through it can do better
            raise RuntimeError(self._no_memory)
        exchange = self._of_group.find(self._key)
        if exchange is None:
            try:
                exchange = self._of_group.open(MEMORY, self._moved.op, self._key, self._group)
            except Exception as error:
                self._no_memory = str(error)
                raise
        assert isinstance(exchange, SymmetricExchange), "no other memory is of GPUs"
        return exchange

    def _close_memory(self, name: str) -> None:
        self._holding.discard(name)
        if not self._holding and self._shared is None:
            self._of_group.close_one(self._key)

    @cached_property
    def _scratch(self) -> tuple[Tensor, Tensor]:
        """Random rows of this rank, packed, and a weight to multiply them by."""
        matmul, features = self._product
        generator = torch.Generator(self._moved.device).manual_seed(self._group.rank())
        dtype = self._moved.dtype if self._moved.dtype.is_floating_point else torch.bfloat16

        def random(*shape: int) -> Tensor:
            numbers = torch.zeros(shape, dtype=dtype, device=self._moved.device)
            return numbers.normal_(std=features**-0.25, generator=generator)

        return matmul.pack(random(self._shape[0], features)), random(self._moved.width, features)

    def _call(self) -> Call:
        return begin(self._moved.op, f"trial of the {self._moved.purpose}", self._group)

    @torch.no_grad()
    def _moving(self, transport: Transport) -> Tensor:
        """Reduce the terms of the pending call; or gather rows, and return their product, if there is one."""
        if self._terms is not None:
            return transport.reduce(self._call(), self._terms, None, at_once=False).wait()
        rows, weight = self._scratch
        gathering = transport.gather(self._call(), rows, self._moved.rows, keeps=False, at_once=False)
        if not self._moved.width:
            return gathering.all()
        (y,) = self._product[0].product(gathering, [weight], [None], dtype=weight.dtype)
        return y


@dataclass(frozen=True)
class Way:
    """A way to move rows, and to compute the product that hides the transfer.

    open: allocates what it needs; an error drops the way on all ranks. Opening may be collective
    recovers: whether an error in a run leaves nothing in flight that another rank would take for its own
    reserve: allocates what runs take, and gives it back; an error here is one of `open`
    shares: names what several ways have open together; if one of them fails, the others open it anew
    """

    name: str
    open: Callable[[], WayRun]
    close: Callable[[], None] = lambda: None
    recovers: bool = False
    reserve: Callable[[], None] = lambda: None
    shares: str = ""


class WayChooser:
    """Chooses a way for the ranks of one group, from the first of these that exists:

    1. what the ranks have in their caches, if all have the same
    2. timing now: each rank times each way, the slowest rank's time counts, and the fastest way wins
    3. the default, where a rank may not time
    """

    def __init__(self, tell: Tell, clock: Clock, cache: Cache, dropped: dict[str, str] | None = None) -> None:
        """dropped: by name and why, ways that failed in earlier choices of the group; more are added"""
        self._tell, self._clock, self._cache = tell, clock, cache
        self._dropped = {} if dropped is None else dropped
        self._complete = True  # whether no way was dropped

    def choose(self, key: str, ways: Sequence[Way], default: str, why_not: str = "") -> Decision[Way]:
        """Choose a way; all ranks call this at once. Only the chosen one is open afterwards.

        default: a name among `ways`
        why_not: why this rank may not time now
        """
        cached = self._cache.get(key)
        told = self._tell([default, cached.name if cached else "", why_not, ",".join(w.name for w in ways)])
        offered = [set(names.split(",")) for *_, names in told]
        in_order = sorted(ways, key=lambda way: way.name)  # on all ranks the same, and so is what was dropped
        defaults = {name for name, *_ in told}
        in_order = [way for way in in_order if way.name in defaults or way.name not in self._dropped]
        self._complete = not self._dropped
        possible = {way.name: way for way in in_order if all(way.name in names for names in offered)}
        # defaults may differ, as sizes of weight shards may: the first that is possible everywhere
        usual = possible[next((name for name, *_ in told if name in possible), min(possible))]
        kept = {name for _, name, _, _ in told}
        if len(kept) == 1 and kept <= possible.keys():
            return self._cached(key, possible[kept.pop()], usual)
        for rank, (_, _, why, _) in enumerate(told):
            if why:
                return Decision(key, usual, "not timed", detail=f"rank {rank}: {why}")
        return self._timed(key, possible, usual)

    def _cached(self, key: str, way: Way, usual: Way) -> Decision[Way]:
        run, why = self._opened(key, way)
        if run is None:
            return Decision(key, usual, "not timed", detail=why)
        choice = self._cache.get(key)
        return Decision(key, way, "cached", choice.milliseconds if choice else {})

    def _timed(self, key: str, possible: Mapping[str, Way], usual: Way) -> Decision[Way]:
        if len(possible) == 1:
            return Decision(key, usual, "only one")
        run, why = self._opened(key, usual, to_run=True)
        if run is None:
            return Decision(key, usual, "not timed", detail=why)
        runs, expected = {usual.name: run}, run()
        untried = [way for way in possible.values() if way is not usual]
        while untried:
            way = untried.pop(0)
            if run := self._opened(key, way, expected, to_run=True)[0]:
                runs[way.name] = run
            elif way.shares:  # which may hold half of a call
                again = [possible[name] for name in runs if possible[name].shares == way.shares]
                for sharing in again:
                    sharing.close()
                    del runs[sharing.name]
                untried = again + untried
        if len(runs) == 1:
            return Decision(key, usual, "only one", detail="no other works")
        milliseconds = self._slowest(runs)
        name = winner(milliseconds, usual.name)
        for other in runs.keys() - {name}:
            possible[other].close()
        if self._complete:  # else the next process may choose from more
            self._cache.put(key, Choice(name, milliseconds))
        return Decision(key, possible[name], "timed", milliseconds)

    def _opened(
        self, key: str, way: Way, expected: Tensor | None = None, *, to_run: bool = False
    ) -> tuple[WayRun | None, str]:
        """Open a way and return its run; or None and why not, the same on all ranks, which then drop the way.

        expected: the result to compare a run with; None: it is not run
        to_run: it will be timed
        """
        run, problem = None, ""
        try:
            if to_run:
                way.reserve()
            run = way.open()
        except Exception as error:  # whatever it is, the others wait to be told
            problem = f"{type(error).__name__}: {error}"
        problem = self._first_problem(problem)  # from here on all ranks are ready
        if not problem and run and expected is not None:
            try:
                problem = _mismatch(run(), expected)
            except Exception as error:
                if not way.recovers:
                    raise
                problem = f"{type(error).__name__}: {error}"
            problem = self._first_problem(problem)
        if problem:
            way.close()
            self._complete = False
            if not any(words in problem.lower() for words in _NO_MEMORY):  # another shape may have enough
                self._dropped[way.name] = problem
            log.warnings.warning("%s dropped for %s: %s", way.name, key, problem)
            return None, problem
        return run, ""

    def _first_problem(self, ours: str) -> str:
        """Return the problem of the first rank that has one, or ""."""
        problems = enumerate(self._tell([ours]))
        return next((f"rank {rank}: {theirs}" for rank, (theirs,) in problems if theirs), "")

    def _slowest(self, runs: Mapping[str, WayRun]) -> dict[str, float]:
        """Time each way, and return its median on the slowest rank."""
        medians = rounds(list(runs), lambda name: self._clock(name, runs[name]), exactly=ROUNDS)
        ours = " ".join(f"{milliseconds:.6g}" for milliseconds in medians.values())
        by_rank = [[float(word) for word in times.split()] for (times,) in self._tell([ours])]
        return {name: max(times) for name, times in zip(runs, zip(*by_rank, strict=True), strict=True)}


def _mismatch(found: Tensor, expected: Tensor) -> str:
    """Return in words how far a result is off, or "" if it is right."""
    if found.shape != expected.shape:
        return f"its result is {tuple(found.shape)}, expected {tuple(expected.shape)}"
    # the caller's own numbers may overflow, in the first steps of fp16: what is left is compared
    there = expected.isfinite()
    wanted = expected.float().where(there, 0.0)
    error, size = float((found.float().where(there, 0.0) - wanted).norm()), float(wanted.norm())
    if error <= TOLERANCE * size:  # a NaN is not
        return ""
    return f"its result is off by {error:.1e} of {size:.1e}"
