"""Selects who waits for the chunks of a call: kernels that compute with them, or the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from math import gcd
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from tpkernels import tp_invariance
from tpkernels.comm.transports.base import Delivery, Exchange
from tpkernels.comm.transports.c10d import Collectives
from tpkernels.comm.transports.mailbox import InRounds, MailboxDelivery, MailboxExchange
from tpkernels.comm.transports.rows import HOST_WAITS, Gathering, HostWaits, PartialOf, Waits
from tpkernels.dispatch import backends
from tpkernels.kernels import invariance
from tpkernels.kernels.activations import Activation
from tpkernels.kernels.operands import DTYPES, MatrixLayout, choose_form, lies_depth_first
from tpkernels.ops.numerics import Operand, Pair, Plain, ProductSum, WaitingProduct

if TYPE_CHECKING:
    from tpkernels.kernels.matmul_tile import MatmulTile
    from tpkernels.kernels.waits import Arrivals


@cache
def _home(kernel: str) -> Any:
    """Return a module of kernels. It is imported at the first call: a CPU needs no Triton."""
    return import_module(f"tpkernels.kernels.{kernel}")


class KernelWaits:
    """Has kernels wait for chunks while the host goes on; it raises if it sees that a wait has timed out."""

    def rows(self, delivery: Delivery, rows: slice) -> Tensor:
        return self._sum(delivery, delivery.memory[rows][None], None, rows)

    def all_rows(self, delivery: Delivery) -> Tensor:
        assert isinstance(delivery, MailboxDelivery), "kernels wait for mailboxes alone"
        slots = delivery.exchange.single_slots[delivery.slot]
        return self._sum(delivery, slots, None, slice(0, delivery.plan.rows))

    def total(self, delivery: Delivery, bias: Tensor | None) -> Tensor:
        return self._sum(delivery, delivery.slots, bias, slice(0, delivery.plan.rows))

    def pushed(self, delivery: Delivery, partial_of: PartialOf) -> bool:
        assert isinstance(delivery, MailboxDelivery), "kernels wait for mailboxes alone"
        exchange = delivery.exchange
        if not kernel_pushes(exchange, partial_of):
            return False
        assert isinstance(partial_of, ProductSum), "only products have a kernel that pushes"
        delivery.before_kernels_push()
        pairs = partial_of.as_linear()
        _home("scatter_linear").scatter_linear(
            pairs,
            departures=_home("waits").Departures(*delivery.departures()),
            ranks=exchange.ranks,
            rank=exchange.rank,
            splits=exchange.splits,
            margin=exchange.margin,
            tile=_timed_tile(delivery, pairs),
        )
        return True

    def product(
        self, delivery: MailboxDelivery, kernel: WaitingProduct, tile: MatmulTile | None
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the product of all rows, each tile once its rows have arrived; and z if it is kept."""
        exchange = delivery.exchange
        y, z = kernel(
            arrivals=_arrivals(delivery),
            first_row=delivery.plan.own.start,
            margin=exchange.margin,
            counted=exchange.counted,
            tile=tile,
        )
        if not y.shape[1]:
            self.all_rows(delivery)  # no tile waits: rows would count as read before they are there
        if word := exchange.late():
            raise _late(delivery, word)
        return y, z

    def advance(self, word: Tensor, awaited: Tensor, step: int, code: int) -> None:
        _home("flags").advance(word, awaited, step, code)

    def _sum(self, delivery: Delivery, slots: Tensor, bias: Tensor | None, rows: slice) -> Tensor:
        """Add up these rows of all slots; a sum over one slot copies it, words too."""
        assert isinstance(delivery, MailboxDelivery), "kernels wait for mailboxes alone"
        exchange, arrivals = delivery.exchange, _arrivals(delivery)
        chunks = exchange.chunk_numbers(rows)
        total: Tensor = _home("reduce").reduce_slots(
            *(slots, bias),
            arrivals=arrivals,
            chunks=chunks,
            margin=exchange.margin,
            counted=exchange.counted,
            tree=_in_tree(),
        )
        if word := exchange.late():
            raise _late(delivery, word)
        return total


class RoundWaits(KernelWaits):
    """Has any product take rows in the slots, behind a kernel of one block that waits for their flags.

    Unlike a stream's own wait (`cuStreamWaitValue32`), a kernel can give up, and a graph captures it.
    """

    def rows(self, delivery: Delivery, rows: slice) -> Tensor:
        assert isinstance(delivery, MailboxDelivery), "kernels wait for mailboxes alone"
        if rows != delivery.plan.own:  # which this stream has put there
            exchange, chunks = delivery.exchange, delivery.exchange.chunk_numbers(rows)
            # it copies a word for each flag: there is nothing else to do
            words = delivery.awaited.expand(1, len(chunks), 1)
            _home("reduce").reduce_slots(
                words,
                arrivals=_arrivals(delivery),
                chunks=chunks,
                margin=exchange.margin,
                counted=exchange.counted,
            )
            if word := exchange.late():
                raise _late(delivery, word)
        return delivery.memory[rows]

    def pushed(self, delivery: Delivery, partial_of: PartialOf) -> bool:
        return False


class KernelSums(HostWaits):
    """Has the host wait (on a GPU its stream alone), and one kernel add up the slots."""

    def total(self, delivery: Delivery, bias: Tensor | None) -> Tensor:
        delivery.await_rows(slice(0, delivery.plan.rows))
        reduce_slots, tree = _home("reduce").reduce_slots, _in_tree()
        total: Tensor
        if bias is not None:
            total = reduce_slots(delivery.slots, bias, tree=tree)
            return total
        # any rows will do; the kernel wants wide ones, and a region's may have one column
        plan, memory = delivery.plan, delivery.memory
        rows, cols = plan.rows // plan.ranks, memory.shape[1]
        if cols % _WIDE_ROW == 0:
            total = reduce_slots(delivery.slots, None, tree=tree)
            return total
        total = reduce_slots(memory.view(plan.ranks, -1, gcd(rows * cols, _WIDE_ROW)), None, tree=tree)
        return total.view(rows, cols)


def _in_tree() -> bool:
    """Whether slots are added in a tree over ranks, as TP-invariance requires."""
    return tp_invariance.mode.segments > 0


KERNEL_WAITS = KernelWaits()
ROUND_WAITS = RoundWaits()
KERNEL_SUMS = KernelSums()
_WIDE_ROW = 1024


def tiles_to_try(pairs: Sequence[Pair], chunk_rows: int, *, waits: bool) -> tuple[MatmulTile, ...]:
    """List tiles of the kernel that waits for chunks, or stores them, but for the one that it takes untold.

    pairs: of a (rows, depth) and weight (cols, depth), the last on the device; none is tried unless all are
        aligned
    """
    (a, weight), *_ = pairs
    rows, cols = a.shape[0], weight.shape[0]
    layouts = _aligned_layouts(pairs)
    if layouts is None:
        return ()
    target = _home("target").target_of(weight.device)
    form = choose_form(target, a.dtype, layouts)
    kernel = "dgrad" if waits and lies_depth_first(weight) else "linear"
    tiles = _home("tiles").chunk_tiles
    _, *others = tiles(kernel, form, a.dtype, target, rows, cols, chunk_rows, waits=waits)
    return tuple(others)


def _timed_tile(delivery: MailboxDelivery, pairs: Sequence[Pair]) -> MatmulTile | None:
    """Return the tile that ranks chose for this operator by timing; None for operands of another form."""
    tile: MatmulTile | None = delivery.exchange.tiles.get(delivery.op)
    return tile if tile is None or _aligned_layouts(pairs) is not None else None


def _aligned_layouts(pairs: Sequence[Pair]) -> tuple[MatrixLayout, ...] | None:
    """Return layouts of the operands, and of a result as theirs; None if descriptors can describe not all."""
    (first, weight), *_ = pairs
    stored = [w.t() if lies_depth_first(w) else w for _, w in pairs]
    layouts = [MatrixLayout.of("", matrix) for matrix in (*(a for a, _ in pairs), *stored)]
    (rows, cols), size = (first.shape[0], weight.shape[0]), first.element_size()
    layouts.append(MatrixLayout("", rows, cols, cols, 1, size, address=0))
    return None if any(layout.tma_obstacle() for layout in layouts) else tuple(layouts)


def _arrivals(delivery: MailboxDelivery) -> Arrivals:
    delivery.before_kernels_wait()
    exchange = delivery.exchange
    arrivals: Arrivals = _home("waits").Arrivals(
        delivery.flags, delivery.awaited, exchange.status, exchange.timeout
    )
    return arrivals


def _late(delivery: MailboxDelivery, word: int) -> RuntimeError:
    """Return the error of a wait that timed out. word: which one, as its kernel wrote it"""
    kernel, chunk = _home("waits").kernel_and_chunk(word)
    return delivery.late_chunk(chunk, f"a wait of {kernel} ran out; results are not valid")


class Multiplied(NamedTuple):
    """How gathered rows are multiplied: by a strategy; this rank's rows, and what made them an operand."""

    numerics: Plain
    own: Operand
    prepare: Callable[[Tensor], Operand]


class MultipliedRows(Gathering):
    """A gather whose rows one kernel multiplies as they arrive."""

    def products(
        self,
        multiplied: Multiplied,
        weights: Sequence[Operand],
        biases: Sequence[Tensor | None],
        transposed: bool = True,
        activation: Activation = "none",
        keep_z: bool = False,
        *,
        keep_rows: bool,
    ) -> list[Tensor]:
        """Compute y = act(x weightᵀ + bias) of all rows, from this rank's own on, as they arrive.

        weights, transposed: as `numerics` takes them
        returns: y of each weight, then z of each, if it is kept
        keep_rows: `wait` is called later
        """
        ys, zs, delivery, (numerics, own, _) = [], [], self.delivery, multiplied
        assert isinstance(delivery, MailboxDelivery), "kernels wait for mailboxes alone"
        x = numerics.received(own, delivery.memory)
        for weight, bias in zip(weights, biases, strict=True):
            kernel = numerics.waiting_product(x, weight, bias, transposed, activation, keep_z)
            tile = None
            if isinstance(weight, Tensor):  # else rows are words, whose tiles are not timed
                tile = _timed_tile(delivery, [(delivery.memory, weight if transposed else weight.t())])
            y, z = KERNEL_WAITS.product(delivery, kernel, tile)
            ys.append(y)
            if z is not None:
                zs.append(z)
        if keep_rows:
            self.wait()
        else:
            delivery.end()
        return ys + zs


def waits_for(op: str, exchange: Exchange, like: Tensor, *, sums: bool = True) -> Waits:
    """Return who waits for rows: kernels where kernels compute, else the host, if it can read the flags.

    like: a tensor of the dtype and device of the rows
    sums: whether rows are added up; else they may be words
    """
    if isinstance(exchange, InRounds):
        waits = waits_for(op, exchange.exchange, like, sums=sums)
        return ROUND_WAITS if waits is KERNEL_WAITS else waits
    kernels_compute = backends.backend == "triton" or (backends.backend == "auto" and like.is_cuda)
    if not isinstance(exchange, MailboxExchange):
        adds = kernels_compute and isinstance(exchange, Collectives) and kernels_take(like.dtype, sums=True)
        return KERNEL_SUMS if adds else HOST_WAITS
    if kernels_compute:
        if not kernels_take(like.dtype, sums=sums):
            raise TypeError(
                f"{op}: kernels that wait take bfloat16, float16 and float32, got {like.dtype}: convert "
                "it, or set TPKERNELS_TRANSPORT=c10d"
            )
        if exchange.flag_kernels is not KERNEL_WAITS:
            exchange.count_by(KERNEL_WAITS)
        return KERNEL_WAITS
    if exchange.host_waits:
        return HOST_WAITS
    raise ValueError(
        f"{op}: TPKERNELS_BACKEND={backends.backend} computes with torch, which cannot wait for flags of a "
        "GPU: leave it at auto, or set TPKERNELS_TRANSPORT=c10d"
    )


def kernel_pushes(exchange: Exchange, partial_of: PartialOf) -> bool:
    """Whether one kernel computes partial sums and stores them in the slots of all ranks.

    Not in batch-invariant mode: it chooses tiles by the size of chunks. Not with TP-invariance: it adds up
    the full depth of this rank, whose segments are to be added in a tree.
    """
    return (
        isinstance(exchange, MailboxExchange)
        and exchange.kernels_can_push
        and a_kernel_computes(partial_of, exchange.dtype)
    )


def a_kernel_computes(partial_of: PartialOf | None, dtype: torch.dtype) -> TypeGuard[ProductSum]:
    """Whether one kernel can compute partial sums and store them, where memory allows it."""
    return (
        isinstance(partial_of, ProductSum)
        and len(partial_of.pairs) <= 2
        and all(tensor.dtype == dtype for pair in partial_of.pairs for tensor in pair)
        and not invariance.why_fixed()
    )


def kernels_take(dtype: torch.dtype, *, sums: bool) -> bool:
    """Whether kernels that wait take this dtype: floating point, or if they only copy, words."""
    return dtype in DTYPES or (dtype == torch.int32 and not sums)
