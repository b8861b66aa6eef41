"""Collectives for lists of tensors of mixed dtypes and shapes: packed into buckets, sent, and unpacked.

Each computes the same as a loop of plain collectives, in fewer launches. All buckets are in flight at once;
they are one launch if the backend can combine them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed import ProcessGroup, ReduceOp

from tpkernels.buckets.layout import DEFAULT_BUCKET_BYTES, LayoutRules, lay_out_buckets
from tpkernels.buckets.supported import FLOATING, REDUCIBLE, problem_of
from tpkernels.comm.agreement import Claim, Problem, agree, describe
from tpkernels.comm.groups import (
    Start,
    failed,
    group_or_world,
    start_all_gather,
    start_all_reduce,
    start_broadcast,
    start_reduce_scatter,
    start_together,
)

BucketReduction = Literal["sum", "avg"]
_REDUCTIONS = {"sum": ReduceOp.SUM, "avg": ReduceOp.AVG}
_Begun = tuple[Start, Callable[[], Sequence[Tensor]]]  # a bucket's collective, and its result for each tensor


def bucketed_all_reduce_(
    tensors: Sequence[Tensor],
    group: ProcessGroup | None = None,
    *,
    op: BucketReduction = "sum",
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    check: bool = True,
) -> None:
    """All-reduce each tensor in place.

    check: first compare names, shapes and dtypes over ranks, by one small exchange
    """
    call = _BucketedCall("bucketed_all_reduce_", f"op={op!r}", tensors, group, bucket_bytes)
    call.validate(check, FLOATING if op == "avg" else REDUCIBLE, _op_problem(op), written=True)

    def begin(bucket: list[Tensor]) -> _Begun:
        flat = _pack(bucket)
        start = partial(start_all_reduce, data=flat, reduction=_REDUCTIONS[op], timeout=None)
        return start, partial(_unpack, flat, bucket)

    call.run("all_reduce", begin)


def bucketed_broadcast_(
    tensors: Sequence[Tensor],
    src: int,
    group: ProcessGroup | None = None,
    *,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    check: bool = True,
) -> None:
    """Broadcast each tensor of rank `src` of the world into the other ranks' tensors."""
    call = _BucketedCall("bucketed_broadcast_", f"src={src}", tensors, group, bucket_bytes)
    members = dist.get_process_group_ranks(call.group)
    problem = None
    if src not in members:
        problem = "ValueError", f"src: expected a rank of the group {members}, got {src}"
    call.validate(check, REDUCIBLE, problem, written=True)

    def begin(bucket: list[Tensor]) -> _Begun:
        flat = _pack(bucket)
        start = partial(start_broadcast, data=flat, group_source=members.index(src))
        return start, partial(_unpack, flat, bucket)

    call.run("broadcast", begin)


def bucketed_all_gather(
    shards: Sequence[Tensor],
    group: ProcessGroup | None = None,
    *,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    check: bool = True,
) -> list[Tensor]:
    """All-gather each shard along dimension 0; return a full tensor for each."""
    call = _BucketedCall("bucketed_all_gather", "", shards, group, bucket_bytes)
    call.validate(check, REDUCIBLE, None, written=False)
    ranks = call.group.size()

    def begin(bucket: list[Tensor]) -> _Begun:
        flat = _pack(bucket)
        gathered = flat.new_empty(ranks, flat.numel())

        def results() -> list[Tensor]:
            columns = gathered.split_with_sizes([shard.numel() for shard in bucket], 1)
            return [
                column.contiguous().view(ranks * shard.shape[0] if shard.dim() else ranks, *shard.shape[1:])
                for column, shard in zip(columns, bucket, strict=True)
            ]

        return partial(start_all_gather, gathered=gathered.view(-1), part=flat), results

    return call.run("all_gather", begin)


def bucketed_reduce_scatter(
    tensors: Sequence[Tensor],
    group: ProcessGroup | None = None,
    *,
    op: BucketReduction = "sum",
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    check: bool = True,
) -> list[Tensor]:
    """Reduce-scatter each tensor along dimension 0; return this rank's shard of each."""
    call = _BucketedCall("bucketed_reduce_scatter", f"op={op!r}", tensors, group, bucket_bytes)
    ranks = call.group.size()
    call.validate(check, FLOATING if op == "avg" else REDUCIBLE, _op_problem(op), written=False, shards=ranks)

    def begin(bucket: list[Tensor]) -> _Begun:
        rows = torch.cat([tensor.reshape(ranks, -1) for tensor in bucket], 1)  # row r: what rank r receives
        shard = rows.new_empty(rows.shape[1])
        start = partial(
            start_reduce_scatter, shard=shard, data=rows.view(-1), reduction=_REDUCTIONS[op], timeout=None
        )
        shapes = [(tensor.shape[0] // ranks, *tensor.shape[1:]) for tensor in bucket]
        return start, partial(_split, shard, shapes)

    return call.run("reduce_scatter", begin)


class _BucketedCall:
    """One call of a bucketed collective: its arguments, their validation, and the buckets."""

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

    def validate(
        self,
        check: bool,
        dtypes: tuple[torch.dtype, ...],
        problem: Problem | None,
        *,
        written: bool,
        shards: int | None = None,
    ) -> None:
        """Raise on all ranks if a rank's arguments are wrong; without `check`, on that rank only.

        shards: the number of shards of each tensor along dimension 0
        """
        named = [(str(position), tensor) for position, tensor in enumerate(self.tensors)]
        problem = problem or problem_of(named, dtypes, written=written)
        if problem is None and shards is not None:
            problem = _uneven_problem(named, shards)
        if problem is None and self.bucket_bytes < 1:
            problem = "ValueError", f"bucket_bytes: expected at least one byte, got {self.bucket_bytes}"
        if check:
            tensors = () if problem else tuple(describe(name, tensor) for name, tensor in named)
            agree(Claim(self.request, tensors, problem), self.group)
        elif problem is not None:
            Claim(self.request, (), problem).refuse()

    @torch.no_grad()
    def run(self, operation: str, begin: Callable[[list[Tensor]], _Begun]) -> list[Tensor]:
        """Pack the tensors by dtype, start all buckets in order and wait; return a result for each tensor."""
        layout = lay_out_buckets(
            [tensor.numel() for tensor in self.tensors],
            [tensor.dtype for tensor in self.tensors],
            [tensor.element_size() for tensor in self.tensors],
            LayoutRules(self.bucket_bytes, self.bucket_bytes, alignment=1, padding=1),
        )
        members: list[list[int]] = [[] for _ in layout.elements]
        for index, bucket in enumerate(layout.bucket_of):
            members[bucket].append(index)
        begun = [begin([self.tensors[index] for index in bucket]) for bucket in members]
        try:
            starts = [start for start, _ in begun]
            for work in start_together(self.group, self.tensors[0].device, starts) if starts else ():
                work.wait()
        except RuntimeError as error:
            what = f"{self.name}: {operation} of {len(begun)} buckets"
            raise failed(what, self.group.group_name, self.group.size(), error) from error
        found = {
            index: result
            for bucket, (_, results) in zip(members, begun, strict=True)
            for index, result in zip(bucket, results(), strict=True)
        }
        return [found[index] for index in range(len(found))]


def _pack(bucket: list[Tensor]) -> Tensor:
    """Concatenate to one flat tensor; a single contiguous tensor is not copied."""
    if len(bucket) == 1:
        return bucket[0].contiguous().view(-1)
    return torch.cat([tensor.reshape(-1) for tensor in bucket])


def _unpack(flat: Tensor, bucket: list[Tensor]) -> list[Tensor]:
    """Copy the packed elements back into the tensors."""
    if len(bucket) > 1 or flat.data_ptr() != bucket[0].data_ptr():
        torch._foreach_copy_(bucket, _split(flat, [tensor.shape for tensor in bucket]))
    elif not bucket[0].is_inference():  # inference tensors have no versions
        increment_version(bucket[0])  # torch's collectives do not: a backward that saved it must raise
    return bucket


def _split(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    ranges = flat.split_with_sizes([math.prod(shape) for shape in shapes])
    return [own.view(shape) for own, shape in zip(ranges, shapes, strict=True)]


def _op_problem(op: str) -> Problem | None:
    return None if op in _REDUCTIONS else ("ValueError", f"op: expected 'sum' or 'avg', got {op!r}")


def _uneven_problem(named: Sequence[tuple[str, Tensor]], shards: int) -> Problem | None:
    for name, tensor in named:
        if tensor.dim() == 0 or tensor.shape[0] % shards:
            return "ValueError", (
                f"'{name}' has shape {tuple(tensor.shape)}; expected a first dimension that {shards} ranks "
                "can share evenly: pad it"
            )
    return None
