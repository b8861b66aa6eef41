"""Who moves the rows of an op, where TPKERNELS_TRANSPORT leaves it open."""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup

from tpkernels.comm.transports import select
from tpkernels.comm.transports.base import Exchange
from tpkernels.comm.transports.c10d import c10d_for
from tpkernels.comm.transports.mailbox import MailboxExchange
from tpkernels.dispatch import backends, log

log.show_choices_if_asked()  # once: `select` cannot, as comm does not know dispatch

_INTERPRETED = "TPKERNELS_BACKEND=triton, whose kernels would wait in the interpreter"


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
    to_all: bool = False,
) -> Exchange:
    """Our end of the exchange of a matrix of (rows, cols), of which each rank owns a shard.

    purpose: what else is in flight at the same time goes through another exchange
    like: a tensor of its dtype and device
    features: width of the product that hides the transfers; 0: there is none
    to_all: whether the sums of a reduce go to all ranks afterwards
    """
    against = _INTERPRETED if backends.backend == "triton" else ""
    return select.exchange_for(
        op,
        purpose,
        like,
        rows,
        cols,
        group,
        features,
        overlap,
        to_all=to_all,
        against_sharing=against,
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
    scatter: bool,
) -> tuple[Exchange, Exchange]:
    """What reduces, and what gathers the sums afterwards: both through memory, or both over c10d."""
    reduces = exchange_for(op, "reduces", like, rows, cols, group, features, overlap, to_all=not scatter)
    if scatter:
        return reduces, reduces
    gathers = exchange_for(op, "gathers", like, rows, cols, group, 0, overlap, to_all=True)
    if isinstance(reduces, MailboxExchange) == isinstance(gathers, MailboxExchange):
        return reduces, gathers
    ranks = group.size()
    return c10d_for(like, rows, features, ranks, overlap), c10d_for(like, rows, 0, ranks, overlap)
