"""A few numbers a token from all ranks to all, in one collective: too small to be cut in pieces."""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup

from tpkernels.comm.groups import start_all_gather


def gather_small(op: str, part: Tensor, group: ProcessGroup) -> Tensor:
    """(ranks, *shape of part): the parts of all ranks, which have one shape."""
    if group.size() == 1:
        return part[None]
    gathered = part.new_empty(group.size(), *part.shape)
    if not gathered.numel():
        return gathered
    try:
        start_all_gather(group, gathered.view(-1), part.reshape(-1)).wait()
    except RuntimeError as error:
        raise RuntimeError(
            f"{op}: rank {group.rank()} of {group.size()} in process group '{group.group_name}' did not get "
            f"what the others know of their parts: one died, came too late, or left the common order of "
            f"calls. Cause: {error}"
        ) from error
    return gathered
