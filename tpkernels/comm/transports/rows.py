"""Rows in flight between the ranks of a group: gathered, or reduced. No autograd, no kernels.

    gathering = transport.gather(call, shard, ...)      reducing = transport.reduce(call, terms, bias, ...)
    for rows, chunk in gathering: ...                   ... more work ...
    full = gathering.all()                              total = reducing.wait()

Sums are taken here and not by a backend: in fp32 (or wider) and in the order of ranks, so that they depend
neither on who came first nor on how the backend adds. gloo adds bfloat16 in bfloat16. For TP-invariance the
order is a tree, see `tp_invariance`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor

from tpkernels.tp_invariance import tree_sum

if TYPE_CHECKING:
    from tpkernels.comm.calls import Call
    from tpkernels.comm.transports.mailbox import MailboxDelivery

T = TypeVar("T")
Until = Callable[[], object]  # blocks until something is there; on a GPU the current stream does
Arriving = tuple[slice, Until | None]  # rows of the matrix, and what to call before they are read


class After(Protocol):
    """What follows a sum: a kernel that adds slots computes it in the same pass."""

    def add_slots(self, slots: Tensor, bias: Tensor | None, **how: Any) -> Tensor:
        """Add the slots plus bias; return what follows from the sum, in the place of the sum."""


@dataclass(slots=True)
class Terms:
    """This rank's terms of a sum over ranks, (rows, cols), computed on demand.

    like: a tensor of the dtype and device in which terms are sent
    compute: of a range of rows, each row once; its result may be overwritten
    dtype: of the sum; None: that of `like`
    width: features of the products that are computed, and hide the transfers; 0: there are none
    tree: terms of ranks are added in a tree, as TP-invariance asks for
    pairs: the terms are Σ a wᵀ of these (a, w), which a kernel may compute and store where they belong
    alone: computes the sum of a rank without others, plus bias; None: the terms, then the bias
    after: what kernels that add slots also compute in that pass; see `Kernels.sum_of`
    """

    rows: int
    cols: int
    like: Tensor
    compute: Callable[[slice], Tensor]
    dtype: torch.dtype | None = None
    width: int = 0
    tree: bool = False
    pairs: Sequence[tuple[Tensor, Tensor]] = ()
    alone: Callable[[Tensor | None], Tensor] | None = None
    after: After | None = None

    def at_once(self) -> Tensor:
        """Compute all terms."""
        return self.compute(slice(0, self.rows))


def part_of(terms: Terms, rows: slice) -> Terms:
    """Return the terms of a range of rows, whose sums stay as wide as they are."""
    if rows.stop - rows.start == terms.rows:
        return replace(terms, dtype=None)
    first = rows.start
    return replace(
        terms,
        rows=rows.stop - first,
        compute=lambda some: terms.compute(slice(first + some.start, first + some.stop)),
        dtype=None,
        pairs=(),
        after=None,
    )


class Kernels(Protocol):
    """What transports ask of kernels; they import none."""

    def take(self, op: str, like: Tensor, *, sums: bool) -> bool:
        """Whether kernels compute with tensors like this one; an error if they should and cannot."""

    def advance(self, word: Tensor, awaited: Tensor, step: int, code: int) -> None:
        """word += step; awaited = word | code."""

    def kernel_and_chunk(self, word: int) -> tuple[str, int]:
        """Which kernel gave up waiting, and for which chunk, from a `status` other than 0."""

    def wait_for(self, delivery: MailboxDelivery, rows: slice) -> None:
        """Make the current stream wait for rows of a delivery."""

    def copy_of(self, delivery: MailboxDelivery) -> Tensor:
        """Return a copy of all rows of a delivery, once they are there."""

    def sum_of(
        self,
        slots: Tensor,
        bias: Tensor | None,
        delivery: MailboxDelivery | None,
        *,
        tree: bool,
        after: After | None = None,
    ) -> Tensor:
        """Return the sum of slots plus bias; of a delivery once they are there.

        after: adds the slots, and returns what follows from the sum
        """

    def pushes(self, terms: Terms, dtype: torch.dtype) -> bool:
        """Whether one kernel computes the terms and stores them in the slots of all ranks."""

    def push(self, delivery: MailboxDelivery, terms: Terms) -> None:
        """Do so."""


class Gather:
    """Rows of all ranks; some may be in flight.

    for rows, chunk in gathering: ...    chunks as they arrive, own rows first; with `keeps` they stay
    gathering.all()                      all rows, which no later call overwrites
    """

    __slots__ = ("_add", "_arriving", "_at_once", "_copy", "_end", "delivery", "full", "keeps", "lasts")

    def __init__(
        self,
        full: Tensor,
        arriving: Sequence[Arriving] = (),
        end: Until | None = None,
        *,
        lasts: bool = True,
        at_once: bool = False,
        keeps: bool = True,
        delivery: MailboxDelivery | None = None,
        copy: Callable[[], Tensor] | None = None,
        add: Add | None = None,
    ) -> None:
        """end: called once, when all rows have been read, or lie where they stay

        lasts: False: `full` is memory of the transport, which the call after the next overwrites
        at_once: rows are given all at once
        keeps: rows are asked for again, by `all`, after they were given one by one
        delivery: of which a kernel of the caller's can wait for rows; then nothing arrives otherwise
        copy: of all rows, which waits for them; None: the host waits
        add: adds up slots; None: `add_up`
        """
        self._add = add
        self.full, self._arriving, self._end, self._copy = full, arriving, end, copy
        self.lasts, self._at_once, self.keeps, self.delivery = lasts, at_once, keeps, delivery

    @property
    def is_whole(self) -> bool:
        """Whether rows are given all at once."""
        return self._at_once or len(self._arriving) < 2

    def watch(self, around: AroundWait) -> None:
        """Put something around each wait."""
        last = next((wait for _, wait in reversed(self._arriving) if wait is not None), None)
        self._arriving = [(rows, wait and around(wait, wait is last)) for rows, wait in self._arriving]
        self._copy = self._copy and around(self._copy, True)
        self._end = self._end and around(self._end, True)

    def __iter__(self) -> Iterator[tuple[slice, Tensor]]:
        arriving = self._arriving
        if self._at_once or len(arriving) < 2:
            full = self.all()
            yield slice(0, full.shape[0]), full
            return
        full = self.full if self.lasts or not self.keeps else torch.empty_like(self.full)
        for rows, wait in arriving:
            if wait is not None:
                wait()
            chunk = self.full[rows]
            if full is not self.full:
                chunk = full[rows].copy_(chunk)
            yield rows, chunk
        self._done(full)

    def all(self) -> Tensor:
        """Wait for all rows."""
        if self._end is None:
            return self.full
        if self._copy is not None:
            full = self._copy()
        else:
            for _, wait in self._arriving:
                if wait is not None:
                    wait()
            full = self.full if self.lasts else self.full.clone()
        self._done(full)
        return full

    def sum_of_terms(self, terms: Terms, bias: Tensor | None) -> Tensor:
        """Wait for the terms of all ranks, which are what is gathered, and add them."""
        full = self.all()
        if not full.numel():
            return full.new_empty(terms.rows, terms.cols)
        slots = full.view(-1, terms.rows, terms.cols)
        return self._add(slots, bias, terms) if self._add else add_up(slots, bias, tree=terms.tree)

    def read(self) -> None:
        """Say that a kernel has read all rows of `delivery`; those that are kept it has not."""
        if self.keeps:
            self.all()
        else:
            self._done(self.full)

    def _done(self, full: Tensor) -> None:
        end, self._end, self.full, self.lasts, self._arriving = self._end, None, full, True, ()
        self.delivery = None
        if end is not None:
            end()


class Reduce:
    """Terms of all ranks on their way to the owners of the rows; `wait` returns the sums."""

    __slots__ = ("_add", "_arriving", "_end", "_terms")

    def __init__(
        self, terms: Terms, arriving: Sequence[Until], add: Callable[[], Tensor], end: Until
    ) -> None:
        """arriving: what to call before the terms are added; add: adds them; end: called when that is done"""
        self._terms, self._arriving, self._add, self._end = terms, arriving, add, end

    def watch(self, around: AroundWait) -> None:
        """Put something around the wait."""
        arriving, add = self._arriving, self._add

        def wait_and_add() -> Tensor:
            for wait in arriving:
                wait()
            return add()

        self._arriving, self._add = (), around(wait_and_add, True)

    def wait(self) -> Tensor:
        """Return the sums of this rank's rows in the order of ranks, plus bias, rounded once."""
        for wait in self._arriving:
            wait()
        total = self._add()
        self._end()
        dtype = self._terms.dtype
        return total if dtype is None or total.dtype == dtype else total.to(dtype)


class Reduced:
    """A result that is there already."""

    __slots__ = ("_total",)

    def __init__(self, total: Tensor) -> None:
        self._total = total

    def wait(self) -> Tensor:
        return self._total


class Transport(Protocol):
    """How rows move in a group; chosen by sizes that all ranks share."""

    note: str  # what ranks must do alike, beside what sizes say: it is part of the kind of a call
    way: str  # how rows move, for readers of the journal

    def gather(self, call: Call, shard: Tensor, rows: int, *, keeps: bool, at_once: bool) -> Gather:
        """Start an all-gather. shard: contiguous, as `schedule.bounds` divides `rows` over the ranks"""

    def reduce(self, call: Call, terms: Terms, bias: Tensor | None, *, at_once: bool) -> Reduce:
        """Compute terms and send them, other ranks' rows first; start a reduce-scatter.

        at_once: all is computed before the first row is sent
        """


class AroundWait(Protocol):
    """Puts something around a wait. is_last: of its transfer"""

    def __call__(self, wait: Callable[[], T], is_last: bool) -> Callable[[], T]: ...


class Add(Protocol):
    """Adds up slots of terms, (ranks, rows, cols), plus bias."""

    def __call__(self, slots: Tensor, bias: Tensor | None, terms: Terms) -> Tensor: ...


def add_up(slots: Tensor | Sequence[Tensor], bias: Tensor | None, *, tree: bool = False) -> Tensor:
    """Return the sum of two or more slots in the order of ranks, plus bias, rounded once."""
    dtype = slots[0].dtype
    wide = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
    if tree:
        total = tree_sum([slot.to(wide) for slot in slots])
    else:
        total = slots[0].to(wide) + slots[1]
        for slot in slots[2:]:
            total += slot
    if bias is not None:
        total += bias
    return total.to(dtype)
