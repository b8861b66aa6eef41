"""Who waits for the chunks of a delivery: our kernels, or the host where torch computes on the CPU."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from tpkernels.comm.transports.base import Delivery, Exchange
from tpkernels.comm.transports.c10d import sum_of_slots
from tpkernels.comm.transports.host import HostDelivery, HostExchange
from tpkernels.comm.transports.transfers import blaming
from tpkernels.dispatch import backends
from tpkernels.kernels.activations import Activation

if TYPE_CHECKING:
    from tpkernels.kernels.waits import Arrivals


class Waits(Protocol):
    """Each gives a new tensor, of chunks that are there; chunks are numbered as they lie in the slots."""

    def rows(self, op: str, delivery: Delivery, chunks: range) -> Tensor:
        """(rows, cols) of some chunks that lie one after the other."""

    def total(self, op: str, delivery: Delivery, bias: Tensor | None) -> Tensor:
        """(rows, cols): the sum of the slots in the order of ranks, plus the bias once."""


class HostWaits:
    """Looks at flags in memory of the CPU."""

    def rows(self, op: str, delivery: Delivery, chunks: range) -> Tensor:
        self._await(op, delivery, chunks)
        return _rows_of(delivery, chunks).clone()

    def total(self, op: str, delivery: Delivery, bias: Tensor | None) -> Tensor:
        self._await(op, delivery, range(delivery.flags.numel()))
        return sum_of_slots(delivery.slots, bias)

    def _await(self, op: str, delivery: Delivery, chunks: range) -> None:
        assert isinstance(delivery, HostDelivery), "flags of a GPU are for kernels"
        await_on_host(op, delivery, chunks)


def await_on_host(op: str, delivery: HostDelivery, chunks: Iterable[int]) -> None:
    for chunk in chunks:
        if cause := delivery.missing(chunk):
            raise late_chunk(op, delivery, chunk, cause)


class KernelWaits:
    """Leaves it to kernels: the host goes on at once. Where it can know, it reports a wait that ran out."""

    def rows(self, op: str, delivery: Delivery, chunks: range) -> Tensor:
        return self._sum(op, delivery, _rows_of(delivery, chunks)[None], None, chunks)

    def total(self, op: str, delivery: Delivery, bias: Tensor | None) -> Tensor:
        return self._sum(op, delivery, delivery.slots, bias, range(delivery.flags.numel()))

    def product(
        self,
        op: str,
        delivery: Delivery,
        weight: Tensor,
        bias: Tensor | None,
        activation: Activation,
        keep_z: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """act(x weightᵀ + bias) of all rows, each tile once its rows are there, and z on request."""
        from tpkernels.kernels.gather_linear import gather_linear_fwd  # here: a CPU user need not have Triton

        exchange = delivery.exchange
        y, z = gather_linear_fwd(
            delivery.slots.flatten(0, 1),
            weight,
            bias,
            arrivals=self._arrivals(op, delivery),
            first_row=exchange.rank * exchange.piece_shape[0],
            activation=activation,
            keep_z=keep_z,
            margin=exchange.margin,
        )
        self._raise_if_late(op, delivery)
        return y, z

    def _sum(self, op: str, delivery: Delivery, slots: Tensor, bias: Tensor | None, chunks: range) -> Tensor:
        """A sum over one slot copies it."""
        from tpkernels.kernels.reduce import reduce_slots

        total = reduce_slots(
            slots,
            bias,
            arrivals=self._arrivals(op, delivery),
            chunks=chunks,
            margin=delivery.exchange.margin,
        )
        self._raise_if_late(op, delivery)
        return total

    def _arrivals(self, op: str, delivery: Delivery) -> Arrivals:
        from tpkernels.kernels.target import target_of
        from tpkernels.kernels.waits import Arrivals, spins_in

        if isinstance(delivery, HostDelivery):
            await_on_host(op, delivery, delivery.for_the_host)

        limit = spins_in(delivery.exchange.timeout, target_of(delivery.flags.device))
        return Arrivals(delivery.flags, delivery.awaited, delivery.status, limit)

    def _raise_if_late(self, op: str, delivery: Delivery) -> None:
        from tpkernels.kernels.waits import kernel_and_chunk

        if word := delivery.exchange.late():
            kernel, chunk = kernel_and_chunk(word)
            raise late_chunk(op, delivery, chunk, f"a wait of {kernel} ran out; results are not valid")


def _rows_of(delivery: Delivery, chunks: range) -> Tensor:
    size = delivery.exchange.part_rows(0).stop
    return delivery.slots.flatten(0, 1)[chunks.start * size : chunks.stop * size]


def waits_for(op: str, exchange: Exchange) -> Waits:
    """The host waits in its own memory if torch computes; else kernels do."""
    if backends.backend == "triton" or (backends.backend == "auto" and exchange.status.is_cuda):
        from tpkernels.kernels.operands import DTYPES

        if exchange.dtype not in DTYPES:
            raise TypeError(
                f"{op}: kernels that wait take bfloat16, float16 and float32, got {exchange.dtype}: convert "
                "it, or set TPKERNELS_TRANSPORT=c10d"
            )
        return KernelWaits()
    if isinstance(exchange, HostExchange):
        return HostWaits()
    raise ValueError(
        f"{op}: TPKERNELS_BACKEND={backends.backend} computes with torch, which cannot wait for flags of a "
        "GPU: leave it at auto, or set TPKERNELS_TRANSPORT=c10d"
    )


def late_chunk(op: str, delivery: Delivery, chunk: int, cause: str) -> RuntimeError:
    exchange, problem = delivery.exchange, delivery.problem()
    if first := delivery.call is not None and delivery.call.calls.first_failure():
        cause = first
    elif problem is not None:
        cause += f"; this rank's own rows are not out either: {problem}"
    what = f"rows of rank {chunk // exchange.splits} (chunk {chunk}) did not arrive"
    return blaming(op, what, exchange.name, exchange.rank, exchange.ranks, cause)
