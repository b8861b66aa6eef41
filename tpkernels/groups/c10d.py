"""The only file that uses private functions of torch.distributed.

`torch.distributed.new_group(ranks, use_local_synchronization=True)` needs calls of members only, but derives
the group's name from the ranks and the number of groups of this process. Members that have made different
groups before wait under different names forever, and a group that is made again after it was destroyed finds
stale addresses under its name in the store. So we name groups ourselves and call torch's inner function. Its
signature is the same in torch 2.11 and 2.13.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup, Store, distributed_c10d

from tpkernels.env import NCCL_BLOCKS
from tpkernels.groups.kinds import Ranks


def default_group() -> ProcessGroup:
    """Return the default process group; raise if there is none."""
    return distributed_c10d._get_default_group()


def is_default(group: ProcessGroup) -> bool:
    """Whether `group` is the default process group."""
    return dist.is_initialized() and group is default_group()


def is_alive(group: ProcessGroup) -> bool:
    """Whether `group` and the default group still exist."""
    return group in distributed_c10d._world.pg_map


def default_store() -> Store:
    """Return the key-value store of the default process group."""
    return distributed_c10d._get_default_store()


def default_timeout() -> timedelta:
    """Return the time-out of the default process group."""
    group = default_group()
    try:
        return group._get_backend(group._device_types[0]).options._timeout
    except (AttributeError, IndexError, RuntimeError):  # a wrapped, plugged-in or fake backend
        return distributed_c10d.default_pg_timeout


def splits_the_world(backend: str | None) -> bool:
    """Whether groups of `backend` are split off the default communicator, with calls of every rank.

    NCCL does so if a device is bound to the default group: init_process_group("nccl", device_id=...).
    """
    return _split_source() is not None and is_nccl(backend)


def options_beside_products(backend: str | None, timeout: timedelta) -> Any:
    """Return NCCL options for a group whose collectives overlap with products; None for other backends.

    They set a high-priority stream, whose blocks are scheduled before those of products, and at most as many
    blocks as products leave processors free for (`comm.carveout`).
    """
    if not is_nccl(backend):
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    options.config.max_ctas = NCCL_BLOCKS
    options._timeout = timeout  # else torch warns that it is not the group's
    return options


def is_nccl(backend: str | None) -> bool:
    """Whether `backend`, or for None that of the default group, is NCCL for some device."""
    wanted = distributed_c10d.BackendConfig(dist.Backend(backend or dist.get_backend()))
    return "nccl" in wanted.get_device_backend_map().values()


def stand_aside() -> None:
    """Take part in a split of the default communicator without joining the new group."""
    _split_source().perform_nocolor_split(default_group().bound_device_id)


def _split_source() -> Any:
    default = default_group()
    return None if default.bound_device_id is None else distributed_c10d._get_split_source(default)


def new_group(
    ranks: Ranks, *, name: str, description: str, timeout: timedelta, backend: str | None, options: Any
) -> ProcessGroup:
    """Make a process group of `ranks`, with this rank among them; all pass the same `name`."""
    default = default_group()
    default_backend, store = distributed_c10d._world.pg_map[default]
    group: ProcessGroup
    group, _ = distributed_c10d._new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        list(ranks),
        dist.Backend(backend or default_backend),
        store,
        group_name=distributed_c10d.GroupName(name),
        backend_options=options,
        timeout=timeout,
        device_id=default.bound_device_id,
        group_desc=description,
    )
    distributed_c10d._world.pg_group_ranks[group] = {member: i for i, member in enumerate(ranks)}
    return group


def group_of_this_rank() -> ProcessGroup:
    """Return the process group of this rank alone, made at the first call; torch keeps it until shutdown."""
    if dist.get_world_size() == 1:
        return default_group()
    name, known = f"tpkernels/this rank/{dist.get_rank()}", distributed_c10d._world.pg_names
    for group, its in known.items():
        if its == name:
            return group
    alone = (dist.get_rank(),)
    return new_group(
        alone,
        name=name,
        description="tpkernels this rank",
        timeout=default_timeout(),
        backend=None,
        options=None,
    )


def takes_cpu_tensors_by_gloo(group: ProcessGroup) -> bool:
    """Whether collectives of `group` on CPU tensors go through gloo."""
    return "cpu:gloo" in distributed_c10d._world.pg_backend_config[group].split(",")


def set_timeout(group: ProcessGroup, timeout: timedelta) -> None:
    """Set the time-out of later collectives of `group`."""
    distributed_c10d._set_pg_timeout(timeout, group)


def destroy_group(group: ProcessGroup) -> None:
    """Destroy `group`, unless it was destroyed already, by itself or with the default group."""
    if dist.is_initialized() and group in distributed_c10d._world.pg_map:
        dist.destroy_process_group(group)
