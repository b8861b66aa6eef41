"""Rows in flight as `comm.exchange` has them, over a transport that raises flags."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from tpkernels.comm.calls import Call
from tpkernels.comm.schedule import bounds, chunk_order, peers_by_step
from tpkernels.comm.transports.base import Delivery, Exchange
from tpkernels.comm.transports.c10d import PartialOf, Pending
from tpkernels.kernels.activations import Activation
from tpkernels.ops.tensor_parallel.flag_waits import KernelWaits, Waits

Product = tuple[Tensor, Tensor | None]  # y, and z if it is kept


class FlaggedRows:
    """Shards of all ranks on their way into one matrix; the counterpart of `Gathering`."""

    def __init__(self, call: Call, shard: Tensor, exchange: Exchange, waits: Waits) -> None:
        self._op, self._exchange, self._waits = call.op, exchange, waits
        shard = shard.contiguous()
        with _naming(call.op):
            self._delivery = exchange.start([shard] * exchange.ranks, call)
        self._full: Tensor | None = None

    @property
    def multiplies(self) -> bool:
        """Whether `products` may be asked for: the kernel that waits computes them."""
        return isinstance(self._waits, KernelWaits)

    def products(
        self,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        activation: Activation,
        keep_z: bool,
        *,
        keep_rows: bool,
    ) -> list[Product]:
        """act(x weightᵀ + bias) of all rows, from our own on, as they arrive.

        keep_rows: `wait` is called later
        """
        assert isinstance(self._waits, KernelWaits)
        found = [
            self._waits.product(self._op, self._delivery, weight, bias, activation, keep_z)
            for weight, bias in zip(weights, biases, strict=True)
        ]
        if keep_rows:
            self.wait()
        else:
            self._finish()
        return found

    def arrivals(self) -> Iterator[tuple[slice, Tensor]]:
        """Row ranges and their rows, each as soon as it is there: own rows first, then as planned."""
        exchange = self._exchange
        slots = self._delivery.slots
        full = self._full = slots.new_empty(slots.shape[0] * slots.shape[1], slots.shape[2])
        for chunk in chunk_order(exchange.rank, exchange.ranks, exchange.splits):
            rows = slice(*bounds(full.shape[0], exchange.ranks * exchange.splits, chunk))
            full[rows] = self._waits.rows(self._op, self._delivery, range(chunk, chunk + 1))
            yield rows, full[rows]
        self._finish()

    def wait(self) -> Tensor:
        """All rows."""
        if self._full is None:
            self._full = self._waits.rows(self._op, self._delivery, range(self._delivery.flags.numel()))
            self._finish()
        return self._full

    def _finish(self) -> None:
        _finish(self._op, self._delivery)


class FlaggedSum:
    """Partial sums of all ranks on their way to the owners of the rows; the counterpart of `Reducing`."""

    def __init__(
        self, call: Call, partial_of: PartialOf, exchange: Exchange, waits: Waits, bias: Tensor | None
    ) -> None:
        """Compute and send, others' rows first."""
        self._op, self._waits, self._bias = call.op, waits, bias
        self._delivery = exchange.begin(call)
        size = exchange.piece_shape[0]
        for to, _ in peers_by_step(exchange.ranks, exchange.rank):
            for part in range(exchange.splits):
                there = exchange.part_rows(part)
                partial = partial_of(slice(to * size + there.start, to * size + there.stop))
                with _naming(call.op):
                    self._delivery.push(to, part, partial.contiguous())
        own = partial_of(slice(exchange.rank * size, (exchange.rank + 1) * size))
        self._delivery.push_piece(exchange.rank, own)

    def wait(self) -> Tensor:
        """The sums of this rank's rows, over ranks in their order, plus bias; rounded once."""
        total = self._waits.total(self._op, self._delivery, self._bias)
        _finish(self._op, self._delivery)
        return total


class FlaggedAllSum:
    """Such sums, of all rows on all ranks; the counterpart of `all_reducing`."""

    def __init__(self, call: Call, summing: Pending, gathers: Exchange, waits: Waits) -> None:
        self._call, self._summing, self._gathers, self._waits = call, summing, gathers, waits

    def wait(self) -> Tensor:
        return FlaggedRows(self._call, self._summing.wait(), self._gathers, self._waits).wait()


def _finish(op: str, delivery: Delivery) -> None:
    """What came has been read, and what we sent is out."""
    delivery.release()
    with _naming(op):
        delivery.wait()


@contextmanager
def _naming(op: str) -> Iterator[None]:
    """Errors of an exchange, which serves many operators, name the one it failed in."""
    try:
        yield
    except RuntimeError as error:
        if str(error).startswith(f"{op}: "):
            raise
        raise RuntimeError(f"{op}: {error}") from error
