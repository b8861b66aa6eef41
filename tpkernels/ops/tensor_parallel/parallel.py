"""Steps that ops over a group share: check the group, begin a call, gather rows, sum over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.distributed_c10d import GroupName

from tpkernels.comm.agreement import Claim, agree
from tpkernels.comm.calls import Call, GroupCalls, Kind, calls_of, calls_so_far, kind_of, ranks_of
from tpkernels.comm.groups import refuse_other_devices, required_group
from tpkernels.comm.transports import select
from tpkernels.comm.transports.backend_sums import (
    NOTE,
    BackendSumming,
    backend_sums,
    require_backend_sums,
)
from tpkernels.comm.transports.base import Exchange
from tpkernels.comm.transports.c10d import c10d_for
from tpkernels.comm.transports.mailbox import mailboxes_of
from tpkernels.comm.transports.rows import Gathering, PartialOf, Pending, Reducing, all_reducing, gather_small
from tpkernels.dispatch import backends, log, primitives
from tpkernels.dispatch.operators import Packed
from tpkernels.env import env_flag
from tpkernels.ops.inputs import as_dtype
from tpkernels.ops.tensor_parallel.flag_waits import (
    KERNEL_WAITS,
    Multiplied,
    MultipliedRows,
    kernel_pushes,
    waits_for,
)
from tpkernels.tp_invariance import mode

# TPKERNELS_DEBUG=1: ranks compare what they ask for before each call. Read once: an op should cost little.
debug = env_flag("TPKERNELS_DEBUG", default=False)
_INTERPRETED = "TPKERNELS_BACKEND=triton, whose kernels would wait in the interpreter"

log.show_choices_if_asked()  # once: `select` cannot, as comm does not know dispatch


def checked_group(
    group: object,
    op: str,
    x: Tensor,
    *,
    rows: Sequence[int] | None = None,
    width: int | None = None,
    parameters: Sequence[Tensor | None] = (),
    options: Sequence[object] = (),
) -> ProcessGroup:
    """Return `group` if this rank is a member; with TPKERNELS_DEBUG=1 compare the request over ranks first.

    x: an input of the op, before autocast
    rows, width: leading dimensions and features of the rows that are moved, if not those of x
    parameters: other inputs that may need gradients
    options: all else that ranks must have alike
    """
    group = required_group(group, op=op)
    if debug and group.size() > 1 and not torch.compiler.is_compiling():
        device, dtype = x.device.type, x.dtype
        if torch.is_autocast_enabled(device) and dtype.is_floating_point and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(device)
        grad = torch.is_grad_enabled()
        needs = [grad and each is not None and each.requires_grad for each in (x, *parameters)]
        rows = x.shape[:-1] if rows is None else rows
        width = (x.shape[-1] if x.ndim else 0) if width is None else width
        moved = f"what is moved: {(*rows, width)} {dtype}"
        agree(Claim(op, (moved, f"requires_grad: {needs}", f"options: {tuple(options)}")), group)
    return group


def compare_in_backward(op: str, group: ProcessGroup, needs: Sequence[object]) -> None:
    """With TPKERNELS_DEBUG=1, raise unless all ranks are in this backward and need the same gradients."""
    if debug and group.size() > 1:
        agree(Claim(op, (f"gradients: {[bool(need) for need in needs]}",)), group)


def begin_call(op: str, what: str, shape: tuple[int, ...], like: Tensor, group: ProcessGroup) -> Call:
    """Begin the next numbered call of the group.

    what: describes the transfer, of this shape; like: a tensor of its dtype and device

    A backend without tags would take another call's message for this one's. With such a backend ranks compare
    calls of one description, once, before the first.
    """
    calls, key = calls_of(group), (op, what, shape, like.dtype)
    kind = calls.kinds.get(key)
    if kind is None:
        kind = kind_of(key)
        _compare_new_kind(op, kind, like, calls, group)
        agree_choices(like.device)
        calls.add_kind(key, kind)
    return calls.begin(op, kind, group)


def _compare_new_kind(op: str, kind: Kind, like: Tensor, calls: GroupCalls, group: ProcessGroup) -> None:
    try:
        has_tags = calls.matches_tags(like.device)
    except RuntimeError:
        refuse_other_devices(op, group, like.device)
        raise
    if not has_tags and not (like.is_cuda and torch.cuda.is_current_stream_capturing()):
        agree(Claim(kind.described, ()), group)


def agree_choices(device: torch.device) -> None:
    """Have this GPU's chooser take the kernels that other ranks' choosers take, so that all compute alike.

    Through the store of the world: a rank may be in several tensor-parallel groups, and has one chooser.
    """
    if device.type == "cuda" and dist.is_initialized() and backends.resolve_backend(device) == "fastest":
        primitives.chooser_on(device).agree_through(distributed_c10d._get_default_store())


def gather_numbers(op: str, what: str, part: Tensor, group: ProcessGroup) -> Tensor:
    """Gather a few numbers of all ranks: (ranks, *shape of part)."""
    if group.size() == 1:
        return part[None]
    return gather_small(begin_call(op, what, part.shape, part, group), part)


def name_of(group: ProcessGroup) -> str:
    """Return the name by which an operator under torch.compile takes a group.

    With the size: compiled code is kept on disk, and must not serve a group of this name and another size.
    """
    return f"{group.group_name} of {group.size()} ranks"


def group_named(name: str) -> ProcessGroup:
    """Return the group of a name, of `name_of` or torch's own."""
    return required_group(c10d._resolve_process_group(GroupName(name.rpartition(" of ")[0] or name)))


# How an operator takes its group.
Group = Annotated[ProcessGroup, Packed(str, name_of, group_named)]


def size_of(group: ProcessGroup) -> int:
    """Return `group.size()`, quickly where the group has had calls and nothing is traced."""
    calls = None if torch.compiler.is_compiling() else calls_so_far(group)
    return group.size() if calls is None else calls.ranks


def require_divisible(op: str, x: Tensor, group: ProcessGroup) -> None:
    """Raise unless the ranks of the group divide dimension 0 of x."""
    ranks = size_of(group)
    if x.shape[0] % ranks:
        raise ValueError(
            f"{op}: expected dimension 0 of x divisible by the {ranks} ranks of the group, got "
            f"{tuple(x.shape)}; pad the sequence to a multiple of {ranks}"
        )


def segments_of(op: str, group: ProcessGroup) -> int:
    """Return how many segments of TP-invariance this rank has; 0 without it."""
    return mode.own_segments(op, group.size()) if mode.segments else mode.fix(op)


def require_segments(op: str, segments: int, name: str, size: int) -> None:
    """Raise unless this rank's segments divide a size of its shards. segments: 0 without TP-invariance"""
    if segments and size % segments:
        raise ValueError(
            f"{op}: expected {name} that this rank's {segments} of the {mode.segments} segments of "
            f"TP-invariance divide, got {size}"
        )


class Rounded:
    """A pending fp32 sum; `wait()` casts it to `dtype`."""

    def __init__(self, pending: Pending, dtype: torch.dtype) -> None:
        self._pending, self._dtype = pending, dtype

    def wait(self) -> Tensor:
        return as_dtype(self._pending.wait(), self._dtype)


class Done:
    """A pending result that is there already; `wait()` returns it."""

    def __init__(self, result: Tensor) -> None:
        self._result = result

    def wait(self) -> Tensor:
        return self._result


def start_sum(
    op: str,
    partial_of: PartialOf,
    rows: int,
    cols: int,
    like: Tensor,
    group: ProcessGroup,
    *,
    scatter: bool,
    overlap: bool,
    bias: Tensor | None = None,
    features: int = 0,
) -> Pending:
    """Start the sum over ranks of `partial_of(rows)`: of this rank's rows if scatter, else of all.

    partial_of: computes terms of a range of rows; its result may be overwritten
    features: width of the products that it computes and that hide the transfers; 0: there are none

    Without overlap all is computed before the first row is sent. A group of one rank sends nothing.
    The call begins before anything is computed: if that fails, no rank takes a later call for this one.
    """
    ranks = ranks_of(group)
    if ranks == 1:
        alone = partial_of(slice(0, rows))
        return Done(alone if bias is None else alone + bias)
    assert not (scatter and rows % ranks), "the caller refuses rows that the ranks do not divide"
    what = "shards of the sum" if scatter else "all of the sum"
    if backend_sums:
        require_backend_sums(op, like.device, select.requested_transport)
        call = begin_call(op, what + NOTE, (rows, cols), like, group)
        return BackendSumming(call, partial_of(slice(0, rows)), bias, scatter=scatter)
    reduces, gathers = exchanges_for_sum(
        op, like, rows, cols, group, features, overlap, partial_of=partial_of, scatter=scatter
    )
    waits = waits_for(op, reduces, like)
    if gathers is not reduces:
        waits_for(op, gathers, like)  # which makes it ready for a capture
    pushes = overlap and waits is KERNEL_WAITS and kernel_pushes(reduces, partial_of)
    what += " by a kernel" if pushes else ""  # ranks that do otherwise would meet in other barriers
    call = begin_call(op, what + reduces.note, (rows, cols), like, group)
    if not overlap or (waits is KERNEL_WAITS and not pushes):
        partial_of = partial_of(slice(0, rows)).__getitem__  # at once: small products waste a GPU
    if scatter:
        return Reducing(call, partial_of, rows, cols, like, bias, reduces, waits, overlap)
    return all_reducing(call, partial_of, rows, cols, like, bias, reduces, gathers, waits, overlap)


def exchange_for(
    op: str,
    purpose: str,
    like: Tensor,
    rows: int,
    cols: int,
    group: ProcessGroup,
    features: int,
    overlap: bool,
    *,
    partial_of: PartialOf | None = None,
    multiplied: Multiplied | None = None,
    to_all: bool = False,
) -> Exchange:
    """Return this rank's end of the exchange for a matrix (rows, cols). Each rank owns a shard.

    TPKERNELS_TRANSPORT may name the transport (`comm/transports/select.py`). Else sizes decide on the CPU,
    and on GPUs the ranks time the ways that there are (`ways`).

    purpose: transfers that are in flight at the same time have exchanges of different purposes
    like: a tensor of the matrix's dtype and device
    features: width of the product that hides the transfer; 0: there is none
    partial_of: computes the rows of a reduce; None for a gather
    multiplied: how the product takes the rows of a gather; None: as they are
    to_all: the sums of a reduce are gathered on all ranks afterwards
    """
    against = _INTERPRETED if backends.backend == "triton" else ""
    timed = times_on(like) or (like.is_cuda and features > 0 and multiplied is not None)
    if overlap and timed and rows and cols and not rows % ranks_of(group):
        exchanges = select.exchanges_of(op, group, against)
        if exchanges.transport == "auto":
            how = "" if multiplied is None else str(multiplied.numerics)
            moved = op, purpose, rows, cols, like.dtype, like.device, how
            if found := exchanges.chosen.get(moved):
                return found
            from tpkernels.ops.tensor_parallel.ways import Moved, choose  # on GPUs, where ways are timed

            return choose(Moved(*moved), like, features, group, exchanges, partial_of, multiplied)
    return select.exchange_for(
        op, purpose, like, rows, cols, group, features, overlap, to_all=to_all, against_sharing=against
    )


def exchanges_for_sum(
    op: str,
    like: Tensor,
    rows: int,
    cols: int,
    group: ProcessGroup,
    features: int,
    overlap: bool,
    *,
    partial_of: PartialOf,
    scatter: bool,
) -> tuple[Exchange, Exchange]:
    """Return the exchanges that reduce, and that gather the sums: both through memory, or both by c10d."""
    reduces = exchange_for(
        op, "reduces", like, rows, cols, group, features, overlap, partial_of=partial_of, to_all=not scatter
    )
    if scatter:
        return reduces, reduces
    gathers = exchange_for(op, "gathers", like, rows, cols, group, 0, overlap, to_all=True)
    if (mailboxes_of(reduces) is None) == (mailboxes_of(gathers) is None):
        return reduces, gathers
    ranks = group.size()
    return c10d_for(like, rows, features, ranks, overlap), c10d_for(like, rows, 0, ranks, overlap)


def times_on(like: Tensor) -> bool:
    """Whether ways to move such a tensor are timed: on GPUs. Words are, if their product is known."""
    return like.is_cuda and like.is_floating_point()


Rows = Gathering | Done


def start_rows(
    op: str,
    name: str,
    shard: Tensor,
    group: ProcessGroup,
    features: int = 0,
    overlap: bool = True,
    multiplied: Multiplied | None = None,
    *,
    purpose: str = "gathers",
) -> Rows:
    """Start to gather the shards of all ranks, which have equally many rows.

    name: of the tensor
    features: width of the product that takes rows as they arrive; 0: they are awaited all at once
    multiplied: how that product takes them; None: as they are
    purpose: another for the second of two that are in flight at once, see `exchange_for`
    """
    ranks = ranks_of(group)
    if ranks == 1:
        return Done(shard)
    rows = ranks * shard.shape[0]
    gathers = exchange_for(
        op, purpose, shard, rows, shard.shape[1], group, features, overlap, multiplied=multiplied
    )
    waits = waits_for(op, gathers, shard, sums=False)
    call = begin_call(op, name + gathers.note, shard.shape, shard, group)
    # words are multiplied by those who know what they hold
    known = shard.is_floating_point() or (features > 0 and multiplied is not None)
    multiplies = waits is KERNEL_WAITS and known
    gathering = MultipliedRows if multiplies else Gathering
    return gathering(call, shard, rows, gathers, waits, overlap)


def arrivals(gathering: Rows, overlap: bool, keep: bool = True) -> Iterator[tuple[slice, Tensor]]:
    """Yield rows as they arrive; all at once without overlap, or if a kernel could multiply them."""
    if overlap and not isinstance(gathering, (Done, MultipliedRows)):
        yield from gathering.arrivals(keep=keep)
    else:
        full = gathering.wait()
        yield slice(0, full.shape[0]), full
