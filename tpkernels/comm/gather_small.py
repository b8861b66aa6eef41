"""A few numbers from all ranks to all, at once: too small to be cut in pieces."""

from __future__ import annotations

from torch import Tensor

from tpkernels.comm.calls import Call
from tpkernels.comm.groups import start_all_gather
from tpkernels.comm.transports.c10d import Gathering


def gather_small(call: Call, part: Tensor) -> Tensor:
    """(ranks, *shape of part): the parts of all ranks, which have one shape.

    In one collective, but where tags can keep a rank in another call from being taken for one in this: gloo
    aborts a process that gets a message of another length than it expects.
    """
    try:
        return _gathered(call, part)
    except BaseException as error:  # Ctrl-C, too: the others do not know
        call.calls.fail(f"{type(error).__name__}: {error}")
        raise


def _gathered(call: Call, part: Tensor) -> Tensor:
    calls = call.calls
    if calls.matches_tags(part.device):
        return Gathering(call, part.reshape(1, -1), calls.ranks).wait().view(calls.ranks, *part.shape)
    gathered = part.new_empty(calls.ranks, *part.shape)
    if not gathered.numel():
        return gathered
    try:
        call.wait_for(start_all_gather(call.group, gathered.view(-1), part.reshape(-1)).wait)
    except RuntimeError as error:
        raise RuntimeError(
            f"{call.op}: rank {calls.rank} of {calls.ranks} in process group '{calls.name}' did not get what "
            "the others know of their parts: one died, came too late, or left the common order of calls. "
            f"Cause: {calls.first_failure() or error}"
        ) from error
    return gathered
