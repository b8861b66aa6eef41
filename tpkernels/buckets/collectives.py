"""Collectives for lists of tensors of mixed dtypes and shapes: packed into buckets, sent, and unpacked.

Each does what a loop of plain collectives does, in fewer launches. All are in flight at once; where the
backend can, they are one launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, Work

from tpkernels.buckets.layout import LayoutRules, lay_out_buckets
from tpkernels.buckets.sizes import DEFAULT_BUCKET_BYTES
from tpkernels.comm.agreement import Claim, agree, describe
from tpkernels.comm.groups import (
    Start,
    group_or_world,
    start_all_gather,
    start_all_reduce,
    start_broadcast,
    start_reduce_scatter,
    start_together,
)
from tpkernels.comm.supported import FLOATING, REDUCIBLE, Problem, problem_of

Reduction = Literal["sum", "avg"]
_REDUCTIONS = {"sum": ReduceOp.SUM, "avg": ReduceOp.AVG}


def bucketed_all_reduce_(
    tensors: Sequence[Tensor],
    group: ProcessGroup | None = None,
    *,
    op: Reduction = "sum",
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    check: bool = True,
) -> None:
    """All-reduce each tensor in place.

    check: compare names, shapes and dtypes over ranks first: one small exchange
    """
    call = _Call("bucketed_all_reduce_", f"op={op!r}", tensors, group, bucket_bytes)
    call.validate(check, FLOATING if op == "avg" else REDUCIBLE, _op_problem(op), written=True)
    with torch.no_grad():
        buckets = call.buckets()
        flats = [_pack(bucket) for bucket in buckets]
        call.run("all_reduce", [_all_reducing(flat, _REDUCTIONS[op]) for flat in flats])
        for bucket, flat in zip(buckets, flats, strict=True):
            _unpack(flat, bucket)


def bucketed_broadcast_(
    tensors: Sequence[Tensor],
    src: int,
    group: ProcessGroup | None = None,
    *,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    check: bool = True,
) -> None:
    """Overwrite each tensor with that of rank `src` of the world."""
    call = _Call("bucketed_broadcast_", f"src={src}", tensors, group, bucket_bytes)
    members = dist.get_process_group_ranks(call.group)
    problem = None
    if src not in members:
        problem = "ValueError", f"src: expected a rank of the group {members}, got {src}"
    call.validate(check, REDUCIBLE, problem, written=True)
    with torch.no_grad():
        buckets = call.buckets()
        flats = [_pack(bucket) for bucket in buckets]
        call.run("broadcast", [_broadcasting(flat, members.index(src)) for flat in flats])
        for bucket, flat in zip(buckets, flats, strict=True):
            _unpack(flat, bucket)


def bucketed_all_gather(
    shards: Sequence[Tensor],
    group: ProcessGroup | None = None,
    *,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    check: bool = True,
) -> list[Tensor]:
    """For each shard, the shards of all ranks joined along dimension 0."""
    call = _Call("bucketed_all_gather", "", shards, group, bucket_bytes)
    call.validate(check, REDUCIBLE, None, written=False)
    ranks = call.group.size()
    with torch.no_grad():
        buckets = call.buckets()
        parts = [_pack(bucket) for bucket in buckets]
        gathered = [part.new_empty(ranks, part.numel()) for part in parts]
        call.run("all_gather", [_gathering(*pair) for pair in zip(gathered, parts, strict=True)])
        return call.in_order(
            [
                piece.contiguous().view(_joined(shard.shape, ranks))
                for bucket, whole in zip(buckets, gathered, strict=True)
                for shard, piece in zip(bucket, whole.split_with_sizes(_numels(bucket), 1), strict=True)
            ]
        )


def bucketed_reduce_scatter(
    tensors: Sequence[Tensor],
    group: ProcessGroup | None = None,
    *,
    op: Reduction = "sum",
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    check: bool = True,
) -> list[Tensor]:
    """For each tensor, this rank's part along dimension 0 of the reduced tensor."""
    call = _Call("bucketed_reduce_scatter", f"op={op!r}", tensors, group, bucket_bytes)
    ranks = call.group.size()
    call.validate(check, FLOATING if op == "avg" else REDUCIBLE, _op_problem(op), written=False, parts=ranks)
    with torch.no_grad():
        buckets = call.buckets()
        # row r: what rank r is to receive
        flats = [torch.cat([tensor.reshape(ranks, -1) for tensor in bucket], 1) for bucket in buckets]
        shards = [flat.new_empty(flat.shape[1]) for flat in flats]
        call.run(
            "reduce_scatter",
            [_scattering(shard, flat, _REDUCTIONS[op]) for shard, flat in zip(shards, flats, strict=True)],
        )
        return call.in_order(
            [
                piece.view(tensor.shape[0] // ranks, *tensor.shape[1:])
                for bucket, shard in zip(buckets, shards, strict=True)
                for tensor, piece in zip(
                    bucket, shard.split_with_sizes([numel // ranks for numel in _numels(bucket)]), strict=True
                )
            ]
        )


class _Call:
    """One call of one of the functions above."""

    def __init__(
        self,
        name: str,
        options: str,
        tensors: Sequence[Tensor],
        group: ProcessGroup | None,
        bucket_bytes: int,
    ) -> None:
        self.name = name
        self.request = f"{name}({options}{', ' * bool(options)}bucket_bytes={bucket_bytes})"
        self.tensors = list(tensors)
        self.group = group_or_world(group)
        self.bucket_bytes = bucket_bytes
        self._order: list[int] = []  # of tensors, as they lie in buckets

    def validate(
        self,
        check: bool,
        dtypes: tuple[torch.dtype, ...],
        problem: Problem | None,
        *,
        written: bool,
        parts: int | None = None,
    ) -> None:
        """All ranks go on, or all raise the same error. Without `check`, each judges what it sees.

        parts: into how many each tensor is cut along dimension 0
        """
        named = [(str(position), tensor) for position, tensor in enumerate(self.tensors)]
        problem = problem or problem_of(named, dtypes, written=written)
        if problem is None and parts is not None:
            problem = _uneven_problem(named, parts)
        if problem is None and self.bucket_bytes < 1:
            problem = "ValueError", f"bucket_bytes: expected at least one byte, got {self.bucket_bytes}"
        if check:
            tensors = () if problem else tuple(describe(name, tensor) for name, tensor in named)
            agree(Claim(self.request, tensors, problem), self.group)
        elif problem is not None:
            Claim(self.request, (), problem).refuse()

    def buckets(self) -> list[list[Tensor]]:
        """The tensors, packed by dtype."""
        kinds: dict[torch.dtype, int] = {}
        layout = lay_out_buckets(
            [tensor.numel() for tensor in self.tensors],
            [kinds.setdefault(tensor.dtype, len(kinds)) for tensor in self.tensors],
            [tensor.element_size() for tensor in self.tensors],
            LayoutRules(self.bucket_bytes, self.bucket_bytes, alignment=1, padding=1),
            native=False,
        )
        members: list[list[int]] = [[] for _ in layout.elements]
        for index, bucket in enumerate(layout.bucket_of):
            members[bucket].append(index)
        self._order = [index for bucket in members for index in bucket]
        return [[self.tensors[index] for index in bucket] for bucket in members]

    def run(self, operation: str, starts: list[Start]) -> None:
        """Start all, in this order, and wait for all."""
        try:
            for work in start_together(self.group, self.tensors[0].device, starts) if starts else ():
                work.wait()
        except RuntimeError as error:
            raise RuntimeError(
                f"{self.name}: {operation} of {len(starts)} buckets failed in process group "
                f"'{self.group.group_name}' of {self.group.size()} ranks, here on rank {dist.get_rank()}; a "
                f"rank died, came too late, or left the common order of calls. Cause: {error}"
            ) from error

    def in_order(self, results: list[Tensor]) -> list[Tensor]:
        """Results, which lie as in the buckets, in the order of the tensors."""
        found = dict(zip(self._order, results, strict=True))
        return [found[index] for index in range(len(results))]


def _all_reducing(flat: Tensor, reduction: ReduceOp.RedOpType) -> Start:
    def start(group: ProcessGroup) -> Work:
        return start_all_reduce(group, flat, reduction, None)

    return start


def _broadcasting(flat: Tensor, group_source: int) -> Start:
    def start(group: ProcessGroup) -> Work:
        return start_broadcast(group, flat, group_source)

    return start


def _gathering(gathered: Tensor, part: Tensor) -> Start:
    def start(group: ProcessGroup) -> Work:
        return start_all_gather(group, gathered.view(-1), part)

    return start


def _scattering(shard: Tensor, flat: Tensor, reduction: ReduceOp.RedOpType) -> Start:
    def start(group: ProcessGroup) -> Work:
        return start_reduce_scatter(group, shard, flat.view(-1), reduction, None)

    return start


def _pack(bucket: list[Tensor]) -> Tensor:
    """One flat tensor; a lone contiguous one is not copied."""
    if len(bucket) == 1:
        return bucket[0].contiguous().view(-1)
    return torch.cat([tensor.reshape(-1) for tensor in bucket])


def _unpack(flat: Tensor, bucket: list[Tensor]) -> None:
    if len(bucket) == 1 and flat.data_ptr() == bucket[0].data_ptr():
        return
    pieces = flat.split_with_sizes(_numels(bucket))
    shaped = [piece.view(tensor.shape) for piece, tensor in zip(pieces, bucket, strict=True)]
    torch._foreach_copy_(bucket, shaped)


def _numels(bucket: list[Tensor]) -> list[int]:
    return [tensor.numel() for tensor in bucket]


def _joined(shape: torch.Size, ranks: int) -> tuple[int, ...]:
    return (ranks * shape[0], *shape[1:]) if shape else (ranks,)


def _op_problem(op: str) -> Problem | None:
    return None if op in _REDUCTIONS else ("ValueError", f"op: expected 'sum' or 'avg', got {op!r}")


def _uneven_problem(named: Sequence[tuple[str, Tensor]], parts: int) -> Problem | None:
    for name, tensor in named:
        if tensor.dim() == 0 or tensor.shape[0] % parts:
            return "ValueError", (
                f"'{name}' has shape {tuple(tensor.shape)}; expected a first dimension that {parts} ranks "
                "can share evenly: pad it"
            )
    return None
