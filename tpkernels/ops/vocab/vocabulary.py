"""The shard of a vocabulary that a rank holds, and checks of ids.

R ranks hold as many rows (or columns) each, W. Rank r has those of ids r W ... r W + W - 1; what is past the
last id, `size` - 1, is padding.
"""

from __future__ import annotations

import ctypes
import zlib
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tpkernels.comm.agreement import Claim, agree
from tpkernels.comm.calls import calls_of
from tpkernels.dispatch.operators import Packed
from tpkernels.dispatch.segments import segment_of
from tpkernels.kernels.reference import surely_within
from tpkernels.ops.tensor_parallel import parallel
from tpkernels.ops.tensor_parallel.parallel import group_named, name_of
from tpkernels.ops.tensor_parallel.segments import require_segments, segments_of
from tpkernels.tp_invariance import mode

Group = Annotated[ProcessGroup, Packed(str, name_of, group_named)]


@dataclass(frozen=True)
class VocabShard:
    """This rank's shard of a vocabulary."""

    group: ProcessGroup
    width: int  # rows or columns of each rank
    size: int  # ids of the full vocabulary, without padding

    @property
    def first_id(self) -> int:
        return self.group.rank() * self.width

    @property
    def columns(self) -> int:
        """How many of ours are no padding; they come first."""
        return self._columns(self.first_id, self.width)

    @property
    def segments(self) -> list[VocabSegment]:
        """What one call takes: all of it, or with TP-invariance a segment."""
        parts = max(1, segments_of("vocabulary", self.group))
        width = self.width // parts
        firsts = [self.first_id + number * width for number in range(parts)]
        return [VocabSegment(n, parts, first, self._columns(first, width)) for n, first in enumerate(firsts)]

    def _columns(self, first_id: int, width: int) -> int:
        return min(max(self.size - first_id, 0), width)


class VocabSegment(NamedTuple):
    """One of `parts` equal parts of a rank's rows or columns."""

    number: int
    parts: int
    first_id: int
    columns: int  # that are no padding

    def of(self, shard: Tensor, dim: int) -> Tensor:
        """This part of a rank's shard; the shard itself without TP-invariance."""
        return segment_of(shard, dim, self.number, self.parts) if mode.segments else shard

    def view_of(self, shard: Tensor, dim: int) -> Tensor:
        return shard.tensor_split(self.parts, dim)[self.number]


def vocab_shard(op: str, group: ProcessGroup, width: int, vocab_size: int | None) -> VocabShard:
    """vocab_size: ids of the full vocabulary; None: there is no padding"""
    require_segments(op, segments_of(op, group), [("a shard of the vocabulary", width)])
    return VocabShard(group, width, checked_size(op, group, width, vocab_size))


def checked_size(op: str, group: ProcessGroup, width: int, vocab_size: int | None) -> int:
    """Ids of the full vocabulary."""
    full = group.size() * width
    if vocab_size is None:
        return full
    if not isinstance(vocab_size, int) or not 0 < vocab_size <= full:
        raise ValueError(
            f"{op}: expected a vocab_size from 1 to {full}, what {group.size()} ranks of {width} hold, got "
            f"{vocab_size}"
        )
    return vocab_size


def require_logits(op: str, logits: Tensor) -> None:
    if logits.ndim < 1 or not logits.is_floating_point():
        raise ValueError(
            f"{op}: expected floating-point logits_shard (..., columns), got {tuple(logits.shape)} in "
            f"{logits.dtype}"
        )


def require_ids(op: str, name: str, ids: Tensor, like: Tensor) -> None:
    """Integers, where the other tensor lies."""
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{op}: expected {name} of int64 or int32, got {ids.dtype}; convert it")
    if ids.device != like.device:
        raise ValueError(f"{op}: expected {name} on {like.device} like the other tensors, got {ids.device}")


def require_in_vocabulary(
    op: str, name: str, ids: Tensor, shard: VocabShard, ignored: int | None = None
) -> None:
    """Every id is one of the vocabulary, or the ignored one.

    Ranks are given the same ids, so that all refuse, before anything is sent. To look at ids on a GPU would
    hold up the host: there the GPU looks, and ends the program, as torch's F.embedding and F.cross_entropy
    do. Ids that differ between ranks, as where a sampler deals batches out to all of them, or one rank leaves
    a batch out, would give numbers that look sound: the host looks and ranks compare theirs in the first,
    second, fourth, eighth, ... call, and with TPKERNELS_DEBUG=1 in each. On the CPU others are noted.
    """
    is_shared = shard.group.size() > 1
    compared = is_shared and _is_compared(f"{op} {name}", ids, shard.group)
    if is_shared and ids.is_cpu and not compared:
        calls_of(shard.group).note(f"{op}: {_described(name, ids)}")
    if not compared and surely_within(ids, shard.size):  # none is ignored: one pass, for the usual case
        return
    inside = (ids >= 0) & (ids < shard.size)
    if ignored is not None:
        inside |= ids == ignored
    wanted = f"{name} from 0 to {shard.size - 1}" + (
        f", or {ignored} to be ignored" if ignored is not None else ""
    )
    if ids.device.type != "cpu" and not (compared or parallel.debug):
        torch._assert_async(inside.all(), f"{op}: expected {wanted}")
        return
    problem = None
    if not inside.all():
        problem = f"expected {wanted}, got {int(ids[~inside][0])}; is the vocabulary larger than that?"
    if compared:
        refusal = ("ValueError", problem) if problem and parallel.debug else None
        agree(Claim(op, (_described(name, ids),), refusal, is_data=True), shard.group)
    if problem:
        raise ValueError(f"{op}: {problem}")


def _described(name: str, ids: Tensor) -> str:
    """With a checksum."""
    integers = ids.to("cpu", torch.int64).contiguous()
    bits = ctypes.string_at(integers.data_ptr(), integers.nbytes)
    return f"{name} {tuple(ids.shape)} with checksum {zlib.crc32(bits):08x}"


def _is_compared(what: str, ids: Tensor, group: ProcessGroup) -> bool:
    if ids.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    return calls_of(group).is_due(what) or parallel.debug
