"""Who moves the rows of an op, where TPKERNELS_TRANSPORT leaves it open.

On the CPU `select` knows it from sizes. On GPUs the ranks time what is possible when a group first moves a
shape (`way_chooser`), on scratch and with the product that hides the transfer:

    1 collective     and one product: always possible
    n collectives    each with a part of the product, where there is a product and n divides the ranks
    symmetric        where all ranks are on one machine and kernels compute

Nothing is timed while a CUDA graph is captured or torch.compile traces; with TPKERNELS_TUNE=0; with
TPKERNELS_BATCH_INVARIANT=1 or TPKERNELS_TP_INVARIANT, as the way would depend on the batch that came first;
without overlap, where one collective moves all; nor beyond MOST_TIMED shapes of a group, for lengths that
change from batch to batch. Then collectives move the rows, as many as arithmetic says. Not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tpkernels.comm.agreement import offers_of_all
from tpkernels.comm.calls import Call, begin, handshake
from tpkernels.comm.groups import timeout_of
from tpkernels.comm.schedule import MOST_CHUNKS
from tpkernels.comm.transports import select
from tpkernels.comm.transports.base import Exchange
from tpkernels.comm.transports.c10d import Collectives, c10d_for, collectives_of
from tpkernels.comm.transports.mailbox import MailboxExchange
from tpkernels.comm.transports.rows import Gathering, PartialOf, Reducing
from tpkernels.dispatch import backends, log, primitives
from tpkernels.dispatch.cache import Cache, versions_for
from tpkernels.dispatch.chooser import obstacle
from tpkernels.dispatch.gpus import gpu_of
from tpkernels.dispatch.problem import dtype_class, multiplied_in_tf32, token_class
from tpkernels.dispatch.timing import CudaStream, StreamTimer
from tpkernels.env_flag import env_flag
from tpkernels.kernels import invariance
from tpkernels.kernels.disk_cache import cache_folder
from tpkernels.ops.tensor_parallel.flag_waits import KERNEL_WAITS, MultipliedRows, kernels_take, waits_for
from tpkernels.ops.tensor_parallel.way_chooser import Clock, Run, Way, WayChooser

log.show_choices_if_asked()  # once: `select` cannot, as comm does not know dispatch

MOST_TIMED = 32  # a layer has about ten
TRIAL_SECONDS = 20.0  # until a rank that does not come is an error, while a way is tried
_INTERPRETED = "TPKERNELS_BACKEND=triton, whose kernels would wait in the interpreter"

Moving = Callable[[Exchange], Tensor]  # one call of what moves, and its result


def exchange_for(
    op: str,
    purpose: str,
    like: Tensor,
    rows: int,
    cols: int,
    group: ProcessGroup,
    features: int,
    overlap: bool,
    *,
    partial_of: PartialOf | None = None,
    to_all: bool = False,
) -> Exchange:
    """Our end of the exchange of a matrix of (rows, cols), of which each rank owns a shard.

    purpose: what else is in flight at the same time goes through another exchange
    like: a tensor of its dtype and device
    features: width of the product that hides the transfer; 0: there is none
    partial_of: what computes the rows of a reduce; None for a gather
    to_all: whether the sums of a reduce go to all ranks afterwards
    """
    against = _INTERPRETED if backends.backend == "triton" else ""
    if overlap and times_on(like) and rows and cols and not rows % group.size():
        exchanges = select.exchanges_of(op, group, against)
        if exchanges.transport == "auto":
            moved = Moved(op, purpose, rows, cols, like.dtype, like.device)
            found = exchanges.chosen.get(moved)
            return found or _choose(moved, like, features, group, exchanges, partial_of)
    return select.exchange_for(
        op, purpose, like, rows, cols, group, features, overlap, to_all=to_all, against_sharing=against
    )


def exchanges_for_sum(
    op: str,
    like: Tensor,
    rows: int,
    cols: int,
    group: ProcessGroup,
    features: int,
    overlap: bool,
    *,
    partial_of: PartialOf,
    scatter: bool,
) -> tuple[Exchange, Exchange]:
    """What reduces, and what gathers the sums afterwards: both through memory, or both over c10d."""
    reduces = exchange_for(
        op, "reduces", like, rows, cols, group, features, overlap, partial_of=partial_of, to_all=not scatter
    )
    if scatter:
        return reduces, reduces
    gathers = exchange_for(op, "gathers", like, rows, cols, group, 0, overlap, to_all=True)
    if isinstance(reduces, MailboxExchange) == isinstance(gathers, MailboxExchange):
        return reduces, gathers
    ranks = group.size()
    return c10d_for(like, rows, features, ranks, overlap), c10d_for(like, rows, 0, ranks, overlap)


def times_on(like: Tensor) -> bool:
    """Whether ways are timed there. Not of words, whose product is not known here."""
    return like.is_cuda and like.is_floating_point()


class Moved(NamedTuple):
    """What is chosen for: all that ranks of a call have in common. Widths of their products may differ."""

    op: str
    purpose: str
    rows: int
    cols: int
    dtype: torch.dtype
    device: torch.device

    def key(self, features: int, ranks: int, machines: int) -> str:
        """One line that names it in files and logs.

        TF32 is in it, but not in what a process remembers: ranks may differ in it, and must choose together.
        """
        dtype = dtype_class(self.dtype, multiplied_in_tf32(self.dtype))
        sizes = f"{token_class(self.rows)}x{self.cols}x{features}"
        return f"{self.op} {self.purpose} {dtype} {sizes} {ranks} ranks {machines} machines"


def _choose(
    moved: Moved,
    like: Tensor,
    features: int,
    group: ProcessGroup,
    exchanges: select.Exchanges,
    partial_of: PartialOf | None,
) -> Exchange:
    key = moved.key(features, group.size(), exchanges.machines)
    usual = c10d_for(like, moved.rows, features, group.size(), overlap=True)
    if why := obstacle(moved.device):  # no rank may talk now; all are in the same call
        log.choices.info("%s: %s (not timed now: %s)", key, _name(usual), why)
        return usual
    if len(exchanges.chosen) >= MOST_TIMED:
        return usual

    def tell(texts: Sequence[str]) -> list[list[str]]:
        call = handshake(moved.op, f"ways of the {moved.purpose}", group)
        return offers_of_all(key, call, "", "", texts)

    ways = _Ways(moved, features, group, exchanges, partial_of)
    chooser = WayChooser(tell, clock_on(moved.device), cache_on(moved.device))
    verdict = chooser.choose(key, ways.possible(usual), _name(usual), _why_not_timed())
    log.choices.info("%s: %s", key, verdict)
    chosen = exchanges.chosen[moved] = ways.exchanges[verdict.name]
    if isinstance(chosen, MailboxExchange):
        chosen.timeout = timeout_of(group, moved.device)
    return chosen


def _name(exchange: Exchange) -> str:
    if isinstance(exchange, Collectives):
        return f"{exchange.rounds} collective{'s' * (exchange.rounds > 1)}"
    return "point to point"


def _why_not_timed() -> str:
    if not env_flag("TPKERNELS_TUNE", default=True):
        return "TPKERNELS_TUNE=0"
    return invariance.why_fixed()


class _Ways:
    """The ways to move one shape, each as a run on scratch that they share."""

    def __init__(
        self,
        moved: Moved,
        features: int,
        group: ProcessGroup,
        exchanges: select.Exchanges,
        partial_of: PartialOf | None,
    ) -> None:
        self._moved, self._features, self._group = moved, features, group
        self._of_group, self._partial_of = exchanges, partial_of
        self._shape = moved.rows // group.size(), moved.cols
        self._key: select.Key = moved.purpose, self._shape, moved.dtype, moved.device
        self._shared = exchanges.find(self._key)  # with a choice for a product of another width
        self.exchanges: dict[str, Exchange] = {}  # by way; of memory once it is open

    def possible(self, usual: Exchange) -> list[Way]:
        """usual: the exchange over c10d that arithmetic asks for"""
        most = MOST_CHUNKS if self._features else 1
        rounds = [n for n in range(1, most + 1) if self._group.size() % n == 0]
        by_c10d = [usual, *map(collectives_of, rounds)]
        self.exchanges = {_name(exchange): exchange for exchange in by_c10d}
        ways = [Way(name, partial(self._open_c10d, exchange)) for name, exchange in self.exchanges.items()]
        sums = self._partial_of is not None
        kernels_wait = backends.backend != "torch" and kernels_take(self._moved.dtype, sums=sums)
        may_open = self._shared is not None or self._of_group.has_room()
        if kernels_wait and self._of_group.machines == 1 and may_open:
            ways.append(Way("symmetric", self._open_symmetric, self._close_symmetric, recovers=True))
        return ways

    def _open_c10d(self, exchange: Exchange) -> Run:
        return partial(self._moving, exchange)

    def _open_symmetric(self) -> Run:
        exchange = self._shared or self._of_group.open("symmetric", self._moved.op, self._key, self._group)
        if self._shared is None:  # else a wait that runs out would be one of calls in earnest
            exchange.timeout = min(exchange.timeout, TRIAL_SECONDS)
        self.exchanges["symmetric"] = exchange
        return partial(self._moving, exchange)

    def _close_symmetric(self) -> None:
        if self._shared is None:
            self._of_group.close_one(self._key)

    @property
    def _moving(self) -> Moving:
        return self._gathered if self._partial_of is None else self._reduced

    @cached_property
    def _scratch(self) -> tuple[Tensor, Tensor]:
        """A shard to gather, and the weight that its product is with; the user's random stream is left."""
        generator = torch.Generator(self._moved.device).manual_seed(self._group.rank())
        cols, features = self._moved.cols, self._features

        def random(*shape: int) -> Tensor:
            numbers = torch.zeros(shape, dtype=self._moved.dtype, device=self._moved.device)
            return (
                numbers.normal_(std=cols**-0.25, generator=generator)
                if numbers.is_floating_point()
                else numbers
            )

        return random(*self._shape), random(features, cols)

    def _call(self) -> Call:
        return begin(self._moved.op, f"trial of the {self._moved.purpose}", self._group)

    @torch.no_grad()
    def _gathered(self, exchange: Exchange) -> Tensor:
        """All rows, or the product that takes them as they arrive."""
        call, (shard, weight), rows = self._call(), self._scratch, self._moved.rows
        waits = waits_for(self._moved.op, exchange, shard, sums=False)
        if waits is KERNEL_WAITS:
            multiplying = MultipliedRows(call, shard, rows, exchange, waits)
            if not self._features:
                return multiplying.wait()
            ((product, _),) = multiplying.products([weight], [None], "none", False, keep_rows=False)
            return product
        gathering = Gathering(call, shard, rows, exchange, waits)
        if not self._features:
            return gathering.wait()
        full = shard.new_empty(rows, self._features)
        for arrived, chunk in gathering.arrivals():
            primitives.into(primitives.linear, [full[arrived]], chunk, weight, None, "none", False)
        return full

    @torch.no_grad()
    def _reduced(self, exchange: Exchange) -> Tensor:
        """This rank's sums, of the products that are to be reduced now."""
        assert self._partial_of is not None
        call, like = self._call(), torch.empty(0, dtype=self._moved.dtype, device=self._moved.device)
        waits = waits_for(self._moved.op, exchange, like)
        rows, cols = self._moved.rows, self._moved.cols
        return Reducing(call, self._partial_of, rows, cols, like, None, exchange, waits).wait()


class StreamClock:
    """Milliseconds of one run on a stream: the longer of its time there and on the host.

    All ranks run a way equally often: a run that was not held for long enough is not repeated.
    """

    # Milliseconds. Nearly all ways are launched in less, and so held equally long on all ranks: a rank that
    # held its stream for less than the others would count its wait for them.
    LEAST_LAUNCHING = 0.5
    TRIES = 3  # to hold a way for as long as launching it takes

    def __init__(self, timer: StreamTimer) -> None:
        self._timer = timer
        self._launching: dict[str, float] = {}  # of the last run of each way
        self._missed: dict[str, int] = {}  # so many runs of it in turn were not held for long enough

    def __call__(self, name: str, run: Run) -> float:
        launching = max(self.LEAST_LAUNCHING, self._launching.get(name, 0.0))
        on_gpu, on_host, held = self._timer.measured(run, launching)
        self._missed[name] = 0 if held else self._missed.get(name, 0) + 1
        # a run that waits for its stream on the host is never held, and would double the hold each time
        self._launching[name] = on_host if self._missed[name] < self.TRIES else self.LEAST_LAUNCHING
        return max(on_gpu, on_host)


class CudaClock:
    """The same on the current stream of a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._clock = StreamClock(StreamTimer(CudaStream(device)))

    def __call__(self, name: str, run: Run) -> float:
        with torch.cuda.device(self._device):
            return self._clock(name, run)


def clock_on(device: torch.device) -> Clock:
    """Made for each choice: what it overwrites the cache with is not kept."""
    return CudaClock(device)


@cache
def cache_on(device: torch.device) -> Cache:
    """The file that the chooser's choices are in, too."""
    return Cache(cache_folder(), versions_for(gpu_of(device).name))
