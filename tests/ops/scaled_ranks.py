"""What ranks tell of ops in fp8: the bytes they send, and how far they are from one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from tpkernels import Recipe, ops
from tpkernels.comm.calls import Call
from tpkernels.comm.tensor_parallel import TensorParallel
from tpkernels.comm.transports.host import HostDelivery, HostExchange


def _shard(x: Tensor, dim: int | None) -> Tensor:
    """This rank's, of a dimension that is split."""
    return x if dim is None else x.chunk(dist.get_world_size(), dim)[dist.get_rank()]


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None, "ranks are members of it"
    return group


def _leaf(x: Tensor) -> Tensor:
    return x.clone().requires_grad_()


@contextmanager
def bytes_sent() -> Iterator[list[int]]:
    """By this rank to others, over torch.distributed or through shared memory; headers do not count."""
    sent: list[int] = []
    announce, send, put = Call.announce, Call.send, HostExchange.put

    def announcing(self: Call, rows: Tensor | None = None, by_peer: list[Tensor] | None = None) -> None:
        if rows is not None:
            sent.extend([rows.nbytes] * len(self.calls.peers))
        if by_peer is not None:
            sent.extend(by_peer[peer].nbytes for peer in self.calls.peers)
        announce(self, rows, by_peer)

    def sending(self: Call, rows: Tensor, peer: int) -> None:
        sent.append(rows.nbytes)
        send(self, rows, peer)

    def putting(self: HostExchange, peer: int, there: slice, rows: Tensor, delivery: HostDelivery) -> None:
        sent.append(rows.nbytes)
        put(self, peer, there, rows, delivery)

    with (
        patch.object(Call, "announce", announcing),
        patch.object(Call, "send", sending),
        patch.object(HostExchange, "put", putting),
    ):
        yield sent


@patch.object(TensorParallel, "fits_in_message", lambda self, shard: False)
def bytes_of(hidden: int, recipe: Recipe | None, dtype: torch.dtype = torch.bfloat16) -> dict[str, int]:
    """Of each call of a column and a row linear of `hidden` features; backward gathers x again."""
    group, ranks, tokens = _world(), dist.get_world_size(), 16
    options: dict[str, Any] = {"sequence_parallel": True, "quantize": recipe}
    x, dy = torch.randn(tokens // ranks, hidden).to(dtype), torch.randn(tokens, 32).to(dtype)
    w_column, w_row = torch.randn(32, hidden).to(dtype), torch.randn(hidden, 32).to(dtype)

    def column(x_needs: bool, w_needs: bool) -> Tensor:
        return ops.column_linear(
            x.clone().requires_grad_(x_needs),
            w_column.clone().requires_grad_(w_needs),
            None,
            group,
            **options,
        )

    def row() -> Tensor:
        return ops.row_linear(dy.clone().requires_grad_(), w_row, None, group, **options)

    for y in (column(True, True), row()):  # ranks agree on transports
        y.backward(torch.ones_like(y))
    found = {}
    gathered, scattered, rows = column(False, True), column(True, False), row()
    calls: dict[str, Callable[[], object]] = {
        "column forward: gather of x": lambda: column(False, True),
        "column backward: gather of x": lambda: gathered.backward(dy),
        "column backward: reduce-scatter of dx": lambda: scattered.backward(dy),
        "row forward: reduce-scatter of y": row,
        "row backward: gather of dy": lambda: rows.backward(torch.ones_like(rows)),
    }
    for name, call in calls.items():
        with bytes_sent() as sent:
            call()
            dist.barrier()
        found[name] = sum(sent)

    return found


def apart_from_one_rank(recipe: Recipe, tokens: int = 64, k: int = 1024, n: int = 512) -> dict[str, float]:
    """‖over ranks - on one‖ / ‖on one‖ of the full result, for normal numbers."""
    generator = torch.Generator().manual_seed(5)
    x, w, dy = (
        torch.randn(shape, generator=generator).bfloat16() for shape in ((tokens, k), (n, k), (tokens, n))
    )
    leaves = [_leaf(x), _leaf(w)]
    y = ops.linear(leaves[0], leaves[1], quantize=recipe)
    y.backward(dy)
    whole = {"y": y.detach(), "dx": leaves[0].grad, "dw": leaves[1].grad}
    found = {}
    sides: tuple[tuple[str, Callable[..., Tensor], int | None, int, int | None], ...] = (
        ("column", ops.column_linear, None, 0, 1),
        ("row", ops.row_linear, 1, 1, None),
    )
    for name, op, x_dim, w_dim, dy_dim in sides:
        ours = [_leaf(_shard(x, x_dim)), _leaf(_shard(w, w_dim))]
        y = op(*ours, None, _world(), quantize=recipe)
        y.backward(_shard(dy, dy_dim))
        for result, value, dim in (
            ("y", y.detach(), dy_dim),
            ("dx", ours[0].grad, x_dim),
            ("dw", ours[1].grad, w_dim),
        ):
            full = whole[result]
            assert full is not None, "a leaf has a gradient"
            assert value is not None, "a leaf has a gradient"
            truth = _shard(full, dim)
            squares = torch.stack(
                [(value.double() - truth.double()).square().sum(), truth.double().square().sum()]
            )
            if dim is not None:
                dist.all_reduce(squares)
            found[f"{name} {result}"] = float((squares[0] / squares[1]).sqrt())
    return found
