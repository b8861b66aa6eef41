"""What every op over a group does first: look at the group, and agree on shapes where that was asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeGuard

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import GroupName

from tpkernels.comm.agreement import Claim, agree
from tpkernels.comm.exchange import Gathering, Pending, Reducing, all_reducing
from tpkernels.comm.groups import required_group
from tpkernels.comm.transports import exchange_for
from tpkernels.kernels.switch import switched_on
from tpkernels.ops.flagged import FlaggedAllSum, FlaggedRows, FlaggedSum

# TPKERNELS_DEBUG=1: ranks compare shapes before each transfer. Read once: an op should cost little.
debug = switched_on("TPKERNELS_DEBUG", default=False)


def checked_group(
    group: object, op: str, *, dtype: torch.dtype, rows: tuple[int, ...], width: int
) -> ProcessGroup:
    """`group`, if this rank is a member; with TPKERNELS_DEBUG=1 only if all ranks ask for the same transfers.

    rows: the leading dimensions of what is moved; width: its features
    """
    group = required_group(group)
    if debug and group.size() > 1:
        agree(Claim(op, (f"what is moved: {(*rows, width)} {dtype}",)), group)
    return group


def name_of(group: ProcessGroup) -> str:
    """For an operator under torch.compile. It tells the size, too: compiled code is kept on disk, and that of
    a group with as many ranks fewer would be taken for a group of the same name.
    """
    return f"{group.group_name} of {group.size()} ranks"


def group_named(name: str) -> ProcessGroup:
    """The group that an operator under torch.compile was given by `name_of`, or by its name alone."""
    return c10d._resolve_process_group(GroupName(name.rpartition(" of ")[0] or name))


def require_divisible(op: str, x: Tensor, group: ProcessGroup) -> None:
    """Dimension 0 of x can be split over the ranks."""
    if x.shape[0] % group.size():
        raise ValueError(
            f"{op}: expected dimension 0 of x divisible by the {group.size()} ranks of the group, got "
            f"{tuple(x.shape)}; pad the sequence to a multiple of {group.size()}"
        )


class Done:
    """A result that needed no transfer."""

    def __init__(self, result: Tensor) -> None:
        self._result = result

    def wait(self) -> Tensor:
        return self._result


def start_sum(
    op: str,
    partial_of: Callable[[slice], Tensor],
    rows: int,
    cols: int,
    like: Tensor,
    group: ProcessGroup,
    *,
    scatter: bool,
    overlap: bool,
    bias: Tensor | None = None,
) -> Pending:
    """Sums over ranks of `partial_of(rows)`: of this rank's rows, or of all.

    Without overlap all is computed before the first row travels. A rank alone touches no transfer.
    """
    if group.size() == 1:
        alone = partial_of(slice(0, rows))
        return Done(alone if bias is None else alone + bias)
    ranks = group.size()
    if not rows % ranks:
        shard = rows // ranks
        reduces = exchange_for(op, "reduces", like, shard, cols, group)
        gathers = None if scatter else exchange_for(op, "gathers", like, shard, cols, group)
    else:
        assert not scatter, "the caller refuses rows that the ranks do not divide"
        reduces = gathers = None
    if not overlap:
        partial_of = partial_of(slice(0, rows)).__getitem__
    if reduces is not None:
        summing = FlaggedSum(op, partial_of, reduces, bias)
        return summing if gathers is None else FlaggedAllSum(op, summing, gathers)
    sums = Reducing if scatter else all_reducing
    return sums(op, partial_of, rows, cols, like, group, bias)


Rows = Gathering | FlaggedRows | Done


def start_rows(op: str, shard: Tensor, group: ProcessGroup) -> Rows:
    """All ranks' shards, which have as many rows each."""
    ranks = group.size()
    if ranks == 1:
        return Done(shard)
    gathers = exchange_for(op, "gathers", shard, shard.shape[0], shard.shape[1], group)
    if gathers is None:
        return Gathering(op, shard, ranks * shard.shape[0], group)
    return FlaggedRows(op, shard, gathers)


def arrivals(gathering: Rows, overlap: bool) -> Iterator[tuple[slice, Tensor]]:
    """Rows as they arrive, or all at once."""
    if overlap and not isinstance(gathering, Done):
        yield from gathering.arrivals()
    else:
        full = gathering.wait()
        yield slice(0, full.shape[0]), full


def multiplying(gathering: Rows, overlap: bool) -> TypeGuard[FlaggedRows]:
    """Whether a kernel multiplies the rows as they arrive, all of them in one launch."""
    return overlap and isinstance(gathering, FlaggedRows) and gathering.multiplies
