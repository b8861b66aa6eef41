"""How an op is split over the ranks of a group: what is gathered, what is summed, and by which transport.

    tp = TensorParallel(group, sequence_parallel=True)         made once, and kept with the group's calls
    gathering = tp.gather(op, "x", x_shard)                    all-gather in flight: rows of all ranks
    reducing = tp.reduce(op, terms, bias)                      reduce-scatter in flight: sums of our rows

Without sequence parallelism every rank has all rows: `gather` moves nothing, and `reduce` is an all-reduce.

A transport is chosen when a kind of calls is new, from sizes that all ranks share; on GPUs by timing, which
ranks do together. The choice is kept with the kind.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol
from weakref import ref

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.distributed import ProcessGroup

from tpkernels import journal
from tpkernels.comm.agreement import Claim, agree
from tpkernels.comm.calls import Call, Calls, Key, Kind, calls_of, eager_bytes
from tpkernels.comm.groups import refuse_other_devices
from tpkernels.comm.schedule import bounds, parts_of_shard, swaps_full_sums
from tpkernels.comm.transports import select
from tpkernels.comm.transports.c10d import (
    MESSAGE,
    BackendSums,
    Collectives,
    PointToPoint,
    collectives_of,
    rounds_for,
)
from tpkernels.comm.transports.in_memory import Mailboxes
from tpkernels.comm.transports.rows import Gather, Kernels, Reduce, Reduced, Terms, Transport, part_of
from tpkernels.env import env_choice, env_flag
from tpkernels.tp_invariance import OpInSegments, own_segments

# Who sums over ranks: we, in the order of ranks ("0"), the backend ("1"), or who is timed fastest ("timed").
# Read once. Ranks that differ in it make calls of other kinds, which they compare.
backend_sums = env_choice("TPKERNELS_BACKEND_SUMS", ("0", "1", "timed"))
safe = env_flag("TPKERNELS_SAFE", default=False)  # whether nothing overlaps, whatever layers ask for


class Computing(Kernels, Protocol):
    """What `TensorParallel` asks of those who compute with what moves."""

    def adds(self, like: Tensor) -> bool:
        """Whether a kernel adds the slots that collectives have filled."""

    def against_sharing(self) -> str:
        """Why this rank would rather share no memory of the CPU; nothing if it would."""

    def agree_choices(self, device: torch.device) -> None:
        """Have this rank's choices of kernels be those of the other ranks."""

    def timed_way(
        self, group: ProcessGroup, moved: Moved, like: Tensor, exchanges: select.Exchanges, work: object
    ) -> Transport | None:
        """Return the transport that was timed fastest; None where nothing is timed."""

    def decides(self, like: Tensor) -> bool:
        """Whether what is chosen now is kept; while a graph is captured nothing can be timed."""


class Moved(NamedTuple):
    """A matrix that moves: what ranks choose a transport for.

    purpose: "reduces", or a gather's; what is in flight at once goes through exchanges of different purposes
    rows, cols: of the matrix
    width: features of the product that hides the transfer; 0: there is none
    how: what of gathered rows, besides their shape, is the same on all ranks
    to_all: the sums of a reduce are gathered on all ranks afterwards
    """

    op: str
    purpose: str
    rows: int
    cols: int
    dtype: torch.dtype
    device: torch.device
    width: int = 0
    how: str = ""
    to_all: bool = False

    @property
    def reduces(self) -> bool:
        return self.purpose == "reduces"


class TensorParallel:
    """The split of an op over the ranks of a group."""

    def __init__(
        self,
        group: ProcessGroup | None,
        sequence_parallel: bool = False,
        overlap: bool = True,
        computing: Computing | None = None,
        *,
        segments: int = 0,
        in_memory: bool = True,
    ) -> None:
        """group: None: this rank alone

        segments: of TP-invariance, over all ranks; 0: without it
        in_memory: ranks may share memory, where that is worth it; False: all goes over torch.distributed
        """
        self.sequence_parallel, self.overlap = sequence_parallel, overlap and not safe
        # weakly: it is kept with the group's calls, which end with the group
        self._group = None if group is None or is_compiling() else ref(group)
        self._traced_group = group if is_compiling() else None
        self._computing, self._in_memory = computing, in_memory
        self.ranks = 1 if group is None else group.size()
        self.rank = 0 if group is None else group.rank()
        self.token_shards = self.ranks if sequence_parallel else 1
        self.segments = segments
        self.own_segments = own_segments("a group", segments, self.ranks)  # this rank's
        self._segmented = f" in {segments} segments" if segments else ""
        self._calls = None if group is None or is_compiling() else calls_of(group)
        # `with tp.call`: an op, which fails the group if it raises while a call is under way
        self.call: AbstractContextManager[object] = self._calls or nullcontext()
        if segments and not is_compiling():
            self.call = OpInSegments(segments, self.call)

    @property
    def group(self) -> ProcessGroup | None:
        """The group; None for a rank alone, and after it was destroyed."""
        return self._traced_group if self._group is None else self._group()

    @property
    def calls(self) -> Calls:
        assert self._calls is not None, "there are other ranks"
        return self._calls

    def fits_in_message(self, shard: Tensor) -> bool:
        """Whether rows are so few that they travel with a header."""
        most = eager_bytes(self.ranks) if self._calls is None else self._calls.eager_bytes
        return shard.shape[0] * shard.shape[1] * shard.element_size() <= most

    def gather(
        self,
        op: str,
        name: str,
        shard: Tensor,
        width: int = 0,
        how: str = "",
        work: object = None,
        *,
        everywhere: bool = False,
        rows: int = 0,
        keeps: bool = True,
        at_once: bool = False,
        purpose: str = "gathers",
    ) -> Gather:
        """Start to gather the tokens of all ranks; without sequence parallelism all are here.

        name: of the matrix
        width: features of the narrowest product that takes rows as they arrive; 0: all are awaited at once
        how: what of the rows, besides their shape, must be the same on all ranks
        work: how rows are packed and multiplied, for ranks that time ways to move them
        everywhere: each rank has other rows without sequence parallelism, too
        rows: of the matrix, if ranks do not have equally many
        keeps: rows are asked for again after they were given one by one
        at_once: they are never given one by one
        purpose: another for the second of two that are in flight at once
        """
        if self.ranks == 1 or not (everywhere or self.sequence_parallel):
            return Gather(shard)
        assert self._calls is not None and self._group is not None, "there are other ranks"  # noqa: PT018
        shard, calls, group = shard.contiguous().resolve_neg(), self._calls, self._group()
        at_once = at_once or not self.overlap
        size, cols = shard.shape
        rows = rows or self.ranks * size
        # not with the width, in which ranks may differ: a kind that is new is so on all of them
        shape = rows, cols, shard.dtype, shard.device
        key = op, name, purpose, *shape, how, at_once, self._in_memory, self.segments
        kind = calls.kinds.get(key)
        if kind is None:
            moved = Moved(
                op,
                purpose,
                rows,
                cols,
                shard.dtype,
                shard.device,
                0 if at_once else width,
                how + self._segmented,
            )
            kind = self._new_kind(key, moved, f"gather of {name}{how}", shard, work)
        call, transport = calls.begin(op, kind, group), kind.transport
        if journal.readers or journal.is_profiled():
            moved_key = purpose, (size, cols), shard.dtype, shard.device
            transport = self._watched(call, moved_key, rows, 0 if at_once else width)
        gathering: Gather = transport.gather(call, shard, rows, keeps=keeps, at_once=at_once)
        return gathering

    def reduce(self, op: str, terms: Terms, bias: Tensor | None = None) -> Reduce | Reduced | AllReduce:
        """Start the sum over ranks, plus bias: of our rows under sequence parallelism, else of all rows.

        The call begins before anything is computed: if that fails, no rank takes a later call for this one.
        """
        if self.sequence_parallel or self.ranks == 1:
            return self.reduce_scatter(op, terms, bias)
        return self.all_reduce(op, terms, bias)

    def reduce_scatter(
        self, op: str, terms: Terms, bias: Tensor | None = None, what: str = "shards of the sum"
    ) -> Reduce | Reduced:
        """Start the sum over ranks of our rows. what: for the kind of the call"""
        if self.ranks == 1:
            if terms.alone is not None:
                return Reduced(terms.alone(bias))
            total = terms.at_once()
            total = total if bias is None else total + bias
            return Reduced(total if terms.dtype is None else total.to(terms.dtype))
        assert self._calls is not None and self._group is not None, "there are other ranks"  # noqa: PT018
        kind, calls, group = self._kind_of_sum(op, what, terms), self._calls, self._group()
        call, transport = calls.begin(op, kind, group), kind.transport
        if journal.readers or journal.is_profiled():
            transport = self._watched_sum(call, terms, to_all=what != "shards of the sum")
        reducing: Reduce = transport.reduce(call, terms, bias, at_once=not self.overlap)
        return reducing

    def all_reduce(self, op: str, terms: Terms, bias: Tensor | None = None) -> Reduce | Reduced | AllReduce:
        """Start the sum over ranks of all rows, with the same bits on all ranks."""
        if self.ranks == 1:
            return self.reduce_scatter(op, terms, bias)
        kind = self._kind_of_sum(op, "all of the sum", terms)
        transport: Transport = kind.transport
        if isinstance(transport, BackendSums):
            call, begun = self.calls.begin(op, kind, self.group), transport
            if journal.readers or journal.is_profiled():
                begun = self._watched_sum(call, terms, to_all=True)
            return begun.all_reduce(call, terms, bias)
        if isinstance(transport, Mailboxes):
            return AllReduce(self, op, terms, bias, [slice(0, terms.rows)], swaps=False)
        sum_bytes, chunks = terms.rows * terms.cols * terms.like.element_size(), 1
        swaps = swaps_full_sums(sum_bytes, self.ranks)
        if isinstance(transport, Collectives):
            swaps = swaps and transport.rounds == 1
        elif self.overlap:
            chunks = parts_of_shard(-(-terms.rows // self.ranks) * terms.cols * terms.like.element_size())
        parts = [slice(*bounds(terms.rows, chunks, chunk)) for chunk in range(chunks)]
        return AllReduce(self.over_c10d(), op, terms, bias, parts, swaps=swaps)

    def gather_numbers(self, op: str, what: str, part: Tensor) -> Tensor:
        """Gather a few numbers of all ranks: (ranks, *shape of part)."""
        if self.ranks == 1:
            return part[None]
        rows = self.over_c10d().gather(op, what, part.reshape(1, -1), everywhere=True, at_once=True).all()
        return rows.view(self.ranks, *part.shape)

    def over_c10d(self) -> TensorParallel:
        """Return the same split without memory that ranks share."""
        if not self._in_memory:
            return self
        key = "over c10d", self.sequence_parallel, self.overlap, self.segments
        found: TensorParallel | None = self.calls.splits.get(key)
        if found is None:
            found = TensorParallel(
                self.group,
                self.sequence_parallel,
                self.overlap,
                self._computing,
                segments=self.segments,
                in_memory=False,
            )
            self.calls.splits[key] = found
        return found

    def _kind_of_sum(self, op: str, what: str, terms: Terms) -> Kind:
        like, width = terms.like, terms.width if self.overlap else 0
        shape = terms.rows, terms.cols, like.dtype, like.device
        how = len(terms.pairs), terms.tree, self.overlap, self._in_memory, self.segments
        key = op, what, *shape, width, *how
        assert self._calls is not None, "there are other ranks"
        kind = self._calls.kinds.get(key)
        if kind is None:
            to_all = what != "shards of the sum"
            moved = Moved(op, "reduces", *shape, width, self._segmented, to_all)
            kind = self._new_kind(key, moved, what, like, terms)
        return kind

    def _watched_sum(self, call: Call, terms: Terms, *, to_all: bool) -> Any:
        key = "reduces", (terms.rows // self.ranks, terms.cols), terms.like.dtype, terms.like.device
        return self._watched(call, key, terms.rows, terms.width if self.overlap else 0, to_all=to_all)

    def _watched(self, call: Call, key: select.Key, rows: int, width: int, *, to_all: bool = False) -> Any:
        """Return the transport of a call, which tells the journal. width: of the product that hides it"""
        from tpkernels.comm.told_transport import ToldTransport  # while somebody reads the journal

        transport, (_, (size, cols), dtype, device) = call.kind.transport, key
        why, computing, group = "", self._computing, self.group
        if not self._in_memory:
            why = "it is a part of an all-reduce, or few numbers"
        elif rows % self.ranks:
            why = f"{self.ranks} ranks do not divide its {rows} rows"
        elif not isinstance(transport, Mailboxes) and computing is not None and group is not None:
            exchanges = select.exchanges_of(call.op, group, computing.against_sharing())
            why = exchanges.why_over_c10d(key, to_all=to_all)
        bare = "" if width else "no product takes its rows as they come" if self.overlap else "overlap=False"
        shard = f"{size * cols * dtype.itemsize:,} bytes a rank"
        if width and transport is MESSAGE:
            bare = f"{shard} fit into the message that announces the call"
        elif width and isinstance(transport, PointToPoint) and transport.chunks == 1:
            bare = f"{shard} are not worth cutting"
        elif width and isinstance(transport, Collectives) and transport.rounds == 1:
            bare = "several collectives would take longer than one, by arithmetic or as timed"
        return ToldTransport(transport, call, device, why, bare)

    def _new_kind(self, key: Key, moved: Moved, what: str, like: Tensor, work: object) -> Kind:
        """Add a kind of calls; ranks choose its transport together."""
        op, calls, group = moved.op, self.calls, self.group
        assert group is not None
        try:
            has_tags = calls.has_tags(like.device)
        except RuntimeError:
            refuse_other_devices(op, group, like.device)
            raise
        transport = self._in_memory_of_ranks(moved, like, work) if self._in_memory else None
        transport = transport or self._c10d_for(moved, like, work, has_tags=has_tags)
        rows = moved.rows if moved.reduces or moved.rows % self.ranks else moved.rows // self.ranks
        kind = Kind(
            f"{op}: {what}{transport.note} {(rows, moved.cols)} {like.dtype}{self._segmented}", transport
        )
        if not has_tags and not (like.is_cuda and torch.cuda.is_current_stream_capturing()):
            agree(Claim(kind.described, ()), group)
        if self._computing is not None:
            self._computing.agree_choices(like.device)
            if not self._computing.decides(like):
                return kind
        return calls.add_kind(key, kind)

    def _in_memory_of_ranks(self, moved: Moved, like: Tensor, work: object) -> Transport | None:
        """Return the transport that TPKERNELS_TRANSPORT, sizes or timing say; None for c10d."""
        computing, group, ranks = self._computing, self.group, self.ranks
        rows, cols = moved.rows, moved.cols
        if (
            computing is None
            or not (rows and cols)
            or rows % ranks
            or (moved.reduces and backend_sums == "1")
        ):
            return None
        assert group is not None
        exchanges = select.exchanges_of(moved.op, group, computing.against_sharing())
        if self.overlap and (way := computing.timed_way(group, moved, like, exchanges, work)) is not None:
            return way
        key = moved.purpose, (rows // ranks, cols), like.dtype, like.device
        exchange = exchanges.exchange_for(moved.op, key, group, to_all=moved.to_all)
        if exchange is None:
            return None
        kernels = computing if computing.take(moved.op, like, sums=moved.reduces) else None
        if kernels is None and not exchange.host_waits:
            raise ValueError(
                f"{moved.op}: TPKERNELS_BACKEND=torch computes with torch, which cannot wait for flags of a "
                "GPU: leave it at auto, or set TPKERNELS_TRANSPORT=c10d"
            )
        rounds = rounds_for(like, rows, moved.width, ranks) if exchanges.in_rounds else 0
        stores = self.overlap and not rounds and isinstance(work, Terms)
        pushes = stores and kernels is not None and kernels.pushes(work, exchange.dtype)  # type: ignore[arg-type]
        return Mailboxes(exchange, kernels, rounds, pushes=pushes)

    def _c10d_for(self, moved: Moved, like: Tensor, work: object, *, has_tags: bool) -> Transport:
        computing, ranks, rows = self._computing, self.ranks, moved.rows
        if moved.reduces and backend_sums == "1":
            require_backend_sums(moved.op, like.device, select.requested_transport, tree=work.tree)  # type: ignore[attr-defined]
            return BackendSums()
        if has_tags:
            shard_bytes = -(-rows // ranks) * moved.cols * like.element_size()
            chunks = parts_of_shard(shard_bytes)
            if rows % ranks or chunks > 1 or shard_bytes > self.calls.eager_bytes:
                return PointToPoint(chunks)
            return MESSAGE
        rounds = rounds_for(like, rows, moved.width, ranks) if self.overlap else 1
        adds = computing is not None and computing.adds(like)
        return collectives_of(rounds, computing if adds else None)  # type: ignore[arg-type]


def require_backend_sums(op: str, device: torch.device, transport: str, *, tree: bool) -> None:
    """Raise an error if TPKERNELS_BACKEND_SUMS is set where the backend cannot take the sums."""
    if device.type != "cuda" or transport not in ("auto", "c10d"):
        raise ValueError(
            f"{op}: TPKERNELS_BACKEND_SUMS=1 leaves sums of tensors on GPUs to NCCL, got {device.type} and "
            f"TPKERNELS_TRANSPORT={transport}; unset one of them"
        )
    if tree:
        raise ValueError(
            f"{op}: TPKERNELS_BACKEND_SUMS=1 adds in an order of its own, and TP-invariance asks for one "
            "order; unset one of them"
        )


class AllReduce:
    """An all-reduce in chunks of rows.

    Each rank sends its terms of a chunk to all others, and all add them; or a chunk is reduced, and its sums
    are gathered, while the next is computed.
    """

    def __init__(
        self,
        tp: TensorParallel,
        op: str,
        terms: Terms,
        bias: Tensor | None,
        parts: list[slice],
        *,
        swaps: bool,
    ) -> None:
        self._tp, self._op, self._terms, self._bias = tp, op, terms, bias
        self._gathering: list[tuple[Gather, Terms | None]] = []  # the terms, if they were gathered
        self._reducing: tuple[Reduce | Reduced, Terms] | None = None
        for part in parts:
            some = part_of(terms, part)
            if swaps:
                own = some.at_once()
                gathering = tp.gather(op, "terms of the sum", own, everywhere=True, at_once=True)
                self._gathering.append((gathering, some))
                continue
            some.after = None  # it takes all rows, which are gathered
            reducing = tp.reduce_scatter(op, some, bias, "all of the sum")
            self._gather_reduced()
            self._reducing = reducing, some

    def wait(self) -> Tensor:
        """Return the sums of all rows, plus bias."""
        self._gather_reduced()
        sums = [
            gathering.all() if some is None else gathering.sum_of_terms(some, self._bias)
            for gathering, some in self._gathering
        ]
        total = sums[0] if len(sums) == 1 else torch.cat(sums)
        dtype = self._terms.dtype
        return total if dtype is None or total.dtype == dtype else total.to(dtype)

    def _gather_reduced(self) -> None:
        if self._reducing is not None:
            (reducing, some), self._reducing = self._reducing, None
            gathering = self._tp.gather(self._op, "sums", reducing.wait(), everywhere=True, rows=some.rows)
            self._gathering.append((gathering, None))
