"""The private parts of torch.distributed that we touch, in one place.

`torch.distributed.new_group(ranks, use_local_synchronization=True)` would let only members take part, but
it derives the group's name from the ranks and from how many groups this process has at the moment. Members
with different histories then wait under different names for ever, and a group made again after it was
destroyed finds the addresses of its dead namesake in the store. So we name groups ourselves and call the
function beneath. Same signature in torch 2.11 to 2.14.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup, Store, distributed_c10d

from tpkernels.topology.grid import Ranks


def default_store() -> Store:
    """The key-value store that the default process group was made with."""
    return distributed_c10d._get_default_store()


def default_timeout() -> timedelta:
    """The time-out of the default process group."""
    group = distributed_c10d._get_default_group()
    try:
        return group._get_backend(group._device_types[0]).options._timeout
    except (AttributeError, IndexError, RuntimeError):  # a wrapped, plugged-in or fake backend
        return distributed_c10d.default_pg_timeout


def splits_the_world() -> bool:
    """Whether groups are split off the default communicator, in which every rank must then take part."""
    return distributed_c10d._get_default_group().bound_device_id is not None


def new_group(
    ranks: Ranks, *, name: str, description: str, timeout: timedelta, backend: str | None, options: Any
) -> ProcessGroup | None:
    """A group of `ranks` under a name that its members agree on; None where this rank is not a member."""
    default = distributed_c10d._get_default_group()
    default_backend, store = distributed_c10d._world.pg_map[default]
    rank = dist.get_rank()
    group: ProcessGroup
    group, _ = distributed_c10d._new_process_group_helper(
        len(ranks),
        ranks.index(rank) if rank in ranks else None,
        list(ranks),
        dist.Backend(backend or default_backend),
        store,
        group_name=distributed_c10d.GroupName(name),
        backend_options=options,
        timeout=timeout,
        device_id=default.bound_device_id,
        group_desc=description,
    )
    if rank not in ranks:
        return None
    distributed_c10d._world.pg_group_ranks[group] = {member: i for i, member in enumerate(ranks)}
    return group


def destroy_group(group: ProcessGroup) -> None:
    """Destroy `group`, unless that happened already (with the default group, say)."""
    if dist.is_initialized() and group in distributed_c10d._world.pg_map:
        dist.destroy_process_group(group)
