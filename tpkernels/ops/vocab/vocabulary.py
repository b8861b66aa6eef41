"""The shard of a vocabulary that a rank holds, and checks of ids.

R ranks hold as many rows (or columns) each, W. Rank r has those of ids r W ... r W + W - 1; what is past the
last id, `size` - 1, is padding.
"""

from __future__ import annotations

import ctypes
import zlib
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tpkernels.comm.agreement import Claim, agree, bytes_of_all
from tpkernels.comm.tensor_parallel import TensorParallel
from tpkernels.kernels.reference import surely_within
from tpkernels.ops.tensor_parallel import parallel
from tpkernels.ops.tensor_parallel.parallel import require_segments
from tpkernels.ops.tensor_parallel.segments import segment_of


@dataclass(frozen=True)
class VocabShard:
    """This rank's shard of a vocabulary."""

    tp: TensorParallel
    width: int  # rows or columns of each rank
    size: int  # ids of the full vocabulary, without padding

    @property
    def first_id(self) -> int:
        return self.tp.rank * self.width

    @property
    def columns(self) -> int:
        """How many of this rank's columns are not padding; they come first."""
        return self._columns(self.first_id, self.width)

    @property
    def segments(self) -> list[VocabSegment]:
        """The segments that one call each computes: with TP-invariance several, else the full shard."""
        total = max(1, self.tp.own_segments)
        width = self.width // total
        firsts = [self.first_id + number * width for number in range(total)]
        cut = self.tp.segments > 0
        return [
            VocabSegment(n, total, first, self._columns(first, width), cut) for n, first in enumerate(firsts)
        ]

    def _columns(self, first_id: int, width: int) -> int:
        return min(max(self.size - first_id, 0), width)


class VocabSegment(NamedTuple):
    """One of `total` equal segments of a rank's rows or columns."""

    number: int
    total: int
    first_id: int
    columns: int  # that are no padding
    is_cut: bool  # with TP-invariance

    def of(self, columns: Tensor) -> Tensor:
        """This segment of a rank's columns, contiguous; all of them without TP-invariance."""
        return segment_of(columns, 1, self.number, self.total) if self.is_cut else columns


def vocab_shard(op: str, tp: TensorParallel, width: int, vocab_size: int | None) -> VocabShard:
    """This rank's shard, checked. vocab_size: ids of the full vocabulary; None: there is no padding"""
    require_segments(op, tp, "a shard of the vocabulary", width)
    full = tp.ranks * width
    if vocab_size is None:
        vocab_size = full
    elif not isinstance(vocab_size, int) or not 0 < vocab_size <= full:
        raise ValueError(
            f"{op}: expected a vocab_size from 1 to {full}, what {tp.ranks} ranks of {width} hold, got "
            f"{vocab_size}"
        )
    return VocabShard(tp, width, vocab_size)


def require_logits(op: str, logits: Tensor) -> None:
    """Raise unless logits are floating-point, with a dimension of columns."""
    if logits.ndim < 1 or not logits.is_floating_point():
        raise ValueError(
            f"{op}: expected floating-point logits_shard (..., columns), got {tuple(logits.shape)} in "
            f"{logits.dtype}"
        )


def require_ids(op: str, name: str, ids: Tensor, like: Tensor) -> None:
    """Raise unless ids are int32 or int64, on the device of `like`."""
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{op}: expected {name} of int64 or int32, got {ids.dtype}; convert it")
    if ids.device != like.device:
        raise ValueError(f"{op}: expected {name} on {like.device} like the other tensors, got {ids.device}")


def require_in_vocabulary(
    op: str,
    name: str,
    ids: Tensor,
    shard: VocabShard,
    ignored: int | None = None,
    class_weight: Tensor | None = None,
) -> bool:
    """Raise unless every id is in the vocabulary, or is the ignored one; True: surely all are in it.

    Ranks are given the same ids, so that all raise before anything is sent. Checking ids on a GPU would block
    the host: there a kernel checks them, and ends the program, as in F.embedding and F.cross_entropy. Ids
    that differ between ranks, because a sampler deals batches out to all of them or a rank skips a batch,
    would give plausible numbers. So ranks compare theirs on the host in the first, second, fourth, eighth,
    ... call, and with TPKERNELS_DEBUG=1 in each. On the CPU other calls are noted. So are class weights.
    """
    is_shared = shard.tp.ranks > 1
    compared = is_shared and _is_compared(f"{op} {name}", ids, shard.tp)
    if is_shared and ids.is_cpu and not compared:
        shard.tp.calls.note(f"{op}: {', '.join(_data(name, ids, class_weight))}")
    if not compared and surely_within(ids, shard.size):  # none is ignored: one pass, for the usual case
        return True
    inside = (ids >= 0) & (ids < shard.size)
    if ignored is not None:
        inside |= ids == ignored
    wanted = f"{name} from 0 to {shard.size - 1}" + (
        f", or {ignored} to be ignored" if ignored is not None else ""
    )
    if ids.device.type != "cpu" and not (compared or parallel.debug):
        torch._assert_async(inside.all(), f"{op}: expected {wanted}")
        return False
    problem = None
    if not inside.all():
        problem = f"expected {wanted}, got {int(ids[~inside][0])}; is the vocabulary larger than that?"
    if compared:
        refusal = ("ValueError", problem) if problem and parallel.debug else None
        assert shard.tp.group is not None, "there are other ranks"
        agree(Claim(op, _data(name, ids, class_weight), refusal, is_data=True), shard.tp.group)
    if problem:
        raise ValueError(f"{op}: {problem}")
    return False


_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the size of a float


def require_shards(op: str, logits: Tensor, shard: VocabShard) -> None:
    """Raise if all ranks have the same logits: gathered ones, or those of a weight that is not split.

    Their loss would be log(ranks) too large, or only the first rank's columns would get a gradient. Ranks
    compare some rows in as few calls as they compare ids in. Rows of one number are those of a new head.
    """
    if shard.tp.ranks == 1 or not logits.numel() or not _is_compared(f"{op} logits", logits, shard.tp):
        return
    assert shard.tp.group is not None, "there are other ranks"
    bits = logits.detach()[:: len(logits) // 8 + 1].view(_BITS[logits.dtype.itemsize]).cpu()
    some = bits.view(logits.dtype)
    ours = f"{shard.tp.rank} {_described('logits', bits)}".encode()
    everybody = [each.partition(b" ") for each in bytes_of_all(op, ours, shard.tp.group)]
    ranks, _, logits_of = zip(*everybody, strict=True)
    is_told = len(set(ranks)) == shard.tp.ranks  # not over torch's fake groups, which move no data
    is_one_number = some.amax(1) - some.amin(1) <= 0.01 * some.abs().amax(1)  # up to rounding
    if is_told and len(set(logits_of)) == 1 and not is_one_number.all():
        width = logits.shape[1]
        raise ValueError(
            f"{op}: expected logits of this rank's ids, got the same {width} columns on all {shard.tp.ranks} "
            "ranks; do not gather them (gather_output=False), and split the weight of the head"
        )


def require_class_weight(op: str, weight: Tensor, shard: VocabShard, like: Tensor) -> None:
    """Raise unless there is a weight of each id, of floating point, on the device of `like`, and constant."""
    if weight.shape != (shard.size,) or not weight.is_floating_point():
        raise ValueError(
            f"{op}: expected floating-point class_weight ({shard.size},), one for each id of the full "
            f"vocabulary, got {tuple(weight.shape)} in {weight.dtype}"
        )
    if weight.device != like.device:
        raise ValueError(
            f"{op}: expected class_weight on {like.device} like the other tensors, got {weight.device}"
        )
    if weight.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{op}: expected class_weight without a gradient, which it does not get; detach it")


def _data(name: str, ids: Tensor, class_weight: Tensor | None) -> tuple[str, ...]:
    """What all ranks must have alike, in words."""
    ours = (_described(name, ids.to("cpu", torch.int64)),)
    return ours if class_weight is None else (*ours, _described("class_weight", class_weight.cpu()))


def _described(name: str, tensor: Tensor) -> str:
    """The shape of a tensor of the CPU and a checksum, in words."""
    tensor = tensor.contiguous()
    bits = ctypes.string_at(tensor.data_ptr(), tensor.nbytes)
    return f"{name} {tuple(tensor.shape)} with checksum {zlib.crc32(bits):08x}"


def _is_compared(what: str, ids: Tensor, tp: TensorParallel) -> bool:
    """Whether ranks compare ids in this call."""
    if ids.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    return tp.calls.is_due(what) or parallel.debug
