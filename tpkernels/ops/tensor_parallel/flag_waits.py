"""What transports ask of kernels: to wait for chunks, to add slots, to store terms where they belong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from tpkernels.comm.transports.mailbox import MailboxDelivery
from tpkernels.comm.transports.rows import After, Gather, Terms
from tpkernels.dispatch import backends, primitives
from tpkernels.kernels import invariance
from tpkernels.kernels.operands import DTYPES, MatrixLayout, choose_form, lies_depth_first

if TYPE_CHECKING:
    from tpkernels.kernels.matmul_tile import MatmulTile
    from tpkernels.kernels.tiles import Kernel
    from tpkernels.kernels.waits import Arrivals

Pair = tuple[Tensor, Tensor]  # (rows, depth), and a weight (cols, depth)
# of gathered rows: who waits for them, with which weights, and the computation
Work = tuple["Kernel", Sequence[Any], Callable[[Gather], object]]
NO_TILE = "", None  # kernel and tile, where ranks timed none for an operator


@cache
def _home(kernel: str) -> Any:
    """Return a module of kernels. It is imported at the first call: a CPU needs no Triton."""
    return import_module(f"tpkernels.kernels.{kernel}")


class FlagKernels:
    """Kernels wait for chunks while the host goes on; it raises if it sees that a wait has timed out."""

    def take(self, op: str, like: Tensor, *, sums: bool) -> bool:
        if not _kernels_compute(like):
            return False
        if not (like.dtype in DTYPES or (like.dtype == torch.int32 and not sums)):
            raise TypeError(
                f"{op}: kernels that wait take bfloat16, float16 and float32, got {like.dtype}: convert "
                "it, or set TPKERNELS_TRANSPORT=c10d"
            )
        return True

    def adds(self, like: Tensor) -> bool:
        return like.is_cuda and _kernels_compute(like) and like.dtype in DTYPES

    def against_sharing(self) -> str:
        interprets = backends.backend == "triton"
        return "TPKERNELS_BACKEND=triton, whose kernels would wait in the interpreter" if interprets else ""

    def agree_choices(self, device: torch.device) -> None:
        """Through the store of the world: a rank may be in several groups, and has one autotuner."""
        if device.type == "cuda" and dist.is_initialized() and backends.resolve_backend(device) == "fastest":
            # of NCCL alone, for the next collective; torch made it for ranks that compile
            extend = getattr(distributed_c10d, "_add_ephemeral_timeout_for_all_pgs", lambda more: None)
            primitives.autotuner_on(device).agree_through(distributed_c10d._get_default_store(), extend)

    def advance(self, word: Tensor, awaited: Tensor, step: int, code: int) -> None:
        _home("flags").advance(word, awaited, step, code)

    def kernel_and_chunk(self, word: int) -> tuple[str, int]:
        found: tuple[str, int] = _home("waits").kernel_and_chunk(word)
        return found

    def wait_for(self, delivery: MailboxDelivery, rows: slice) -> None:
        """By a kernel of one block: unlike a stream's own wait it can give up, and a graph captures it."""
        chunks = delivery.exchange.chunk_numbers(rows)
        words = delivery.awaited.expand(1, len(chunks), 1)  # it copies a word for each flag
        self._summed(delivery, words, None, rows, tree=False)

    def copy_of(self, delivery: MailboxDelivery) -> Tensor:
        """By a sum over one slot, which copies it, words too."""
        slots = delivery.exchange.single_slots[delivery.slot]
        return self._summed(delivery, slots, None, slice(0, delivery.plan.rows), tree=False)

    def sum_of(
        self,
        slots: Tensor,
        bias: Tensor | None,
        delivery: MailboxDelivery | None,
        *,
        tree: bool,
        after: After | None = None,
    ) -> Tensor:
        if delivery is not None:
            return self._summed(delivery, slots, bias, slice(0, delivery.plan.rows), tree=tree, after=after)
        add = after.add_slots if after else _home("reduce").reduce_slots
        total: Tensor = add(slots, bias, tree=tree)
        return total

    def _summed(
        self,
        delivery: MailboxDelivery,
        slots: Tensor,
        bias: Tensor | None,
        rows: slice,
        *,
        tree: bool,
        after: After | None = None,
    ) -> Tensor:
        exchange = delivery.exchange
        add = after.add_slots if after else _home("reduce").reduce_slots
        total: Tensor = add(
            slots,
            bias,
            arrivals=_arrivals(delivery),
            chunks=exchange.chunk_numbers(rows),
            margin=exchange.margin,
            tree=tree,
        )
        if word := exchange.late():
            raise _late(delivery, word)
        return total

    def pushes(self, terms: Terms, dtype: torch.dtype) -> bool:
        """Not in batch-invariant mode: it chooses tiles by the size of chunks."""
        return (
            0 < len(terms.pairs) <= 2
            and all(tensor.dtype == dtype for pair in terms.pairs for tensor in pair)
            and not invariance.why_fixed()
        )

    def push(self, delivery: MailboxDelivery, terms: Terms) -> None:
        exchange = delivery.exchange
        _, tile = exchange.tiles.get(delivery.op, NO_TILE)
        operands = [operand for pair in terms.pairs for operand in pair]
        with primitives.told("scatter_linear", operands, "Triton, which stores rows where they belong"):
            _home("scatter_linear").scatter_linear(
                tuple(terms.pairs),
                departures=_home("waits").Departures(*delivery.departures()),
                ranks=exchange.ranks,
                rank=exchange.rank,
                splits=exchange.splits,
                margin=exchange.margin,
                tile=tile if _aligned_layouts(terms.pairs) else None,
            )


FLAG_KERNELS = FlagKernels()


def how_to_wait(
    delivery: MailboxDelivery, kernel: Kernel, rows: Tensor, weights: Sequence[Tensor]
) -> dict[str, Any]:
    """Return how a product of weights is told to wait for all rows of a delivery, each tile for its own.

    With the tile of the kernel, if ranks timed it for this operator, and it serves the operands.
    """
    exchange = delivery.exchange
    timed, tile = exchange.tiles.get(delivery.op, NO_TILE)
    return {
        "tile": tile if timed == kernel and _aligned_layouts(pairs_of(kernel, rows, weights)) else None,
        "arrivals": _arrivals(delivery),
        "first_row": delivery.plan.own.start,
        "margin": exchange.margin,
    }


def has_waited(delivery: MailboxDelivery, computes: bool) -> None:
    """Raise if the host sees that a wait has timed out. computes: whether a product has had a tile"""
    if not computes:
        FLAG_KERNELS.copy_of(delivery)  # no tile waits: rows would count as read before they are there
    if word := delivery.exchange.late():
        raise _late(delivery, word)


def tiles_to_try(
    kernel: Kernel, pairs: Sequence[Pair], chunk_rows: int, *, waits: bool
) -> tuple[MatmulTile, ...]:
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
    tiles = _home("tiles").chunk_tiles
    _, *others = tiles(kernel, form, a.dtype, target, rows, cols, chunk_rows, waits=waits)
    return tuple(others)


def _kernels_compute(like: Tensor) -> bool:
    return backends.backend == "triton" or (backends.backend == "auto" and like.is_cuda)


def pairs_of(kernel: Kernel, rows: Tensor, weights: Sequence[Tensor]) -> list[Pair]:
    """Return the products of a kernel that waits for rows, each with a weight (cols, depth)."""
    return [(rows, weight if kernel in ("linear", "glu") else weight.t()) for weight in weights]


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
    kernel, chunk = FLAG_KERNELS.kernel_and_chunk(word)
    return delivery.late_chunk(chunk, f"a wait of {kernel} ran out; results are not valid")
