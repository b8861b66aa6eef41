"""Process groups as collectives need them: given, alive, and of this process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.distributed import ProcessGroup, ReduceOp, Work, distributed_c10d

from tpkernels.comm.calls import calls_of, calls_so_far
from tpkernels.comm.dump import install_if_asked
from tpkernels.errors import cause_of


def required_group(group: Any, argument: str = "group", op: str = "") -> ProcessGroup:
    """Return `group` if this rank is a member and may use it now; else raise an error."""
    runs = not torch.compiler.is_compiling()
    calls = calls_so_far(group) if runs else None
    if calls is None:  # asked first: `isinstance` of torch's class runs Python
        if not isinstance(group, ProcessGroup):
            got = "not a member's group" if group is dist.GroupMember.NON_GROUP_MEMBER else repr(group)
            raise ValueError(
                f"{argument}: expected a process group that rank {_world_rank()} is a member of, got {got}; "
                "torch.distributed.group.WORLD holds all ranks"
            )
        if not runs:
            return group
        install_if_asked()
        calls = calls_of(group)
    if calls.failure or group not in distributed_c10d._world.pg_map:
        calls.require_usable(op or argument)
    return group  # type: ignore[no-any-return]


def group_or_world(group: object) -> ProcessGroup:
    """Return `group`, or the default group for None."""
    if group is not None:
        return required_group(group)
    if not dist.is_initialized():
        raise ValueError("group: expected torch.distributed to be initialised; call init_process_group first")
    return required_group(dist.group.WORLD)


def timeout_of(group: ProcessGroup, device: torch.device) -> float:
    """Return the time-out in seconds of the group's backend for tensors of `device`."""
    timeout: timedelta = group._get_backend(device).options._timeout
    return timeout.total_seconds()


def refuse_other_devices(op: str, group: ProcessGroup, device: torch.device) -> None:
    """Raise an error if no backend of the group moves tensors of `device`; called after a failure only."""
    kinds = sorted(own.type for own in group._device_types)
    if device.type not in kinds:
        raise ValueError(
            f"{op}: expected tensors on {' or '.join(kinds)}, which process group '{group.group_name}' can "
            f"move, got {device}; move them, or make the group with a backend for {device.type}"
        )


def failed(what: str, name: str, size: int, cause: object) -> RuntimeError:
    """Return the error to raise for a failed collective of the group of that name and size."""
    return RuntimeError(
        f"{what} failed in process group '{name}' of {size} ranks, here on rank {_world_rank()}; a rank "
        f"died, came too late, or left the common order of calls. Cause: {cause_of(cause)}"
    )


def mixing_of(name: str, holders: Collection[int], ranks: Collection[int], wrapper: str) -> str | None:
    """Return what is wrong if `wrapper` averages over `ranks` a parameter whose shards `holders` have."""
    peers = set(holders) & set(ranks)
    if len(peers) < 2:
        return None
    if set(ranks) <= set(holders):
        advice = "these ranks share one model, so there is nothing to average: do not wrap it"
    else:
        advice = 'pass the data-parallel group, state.process_group("dp") or mesh["dp"]'
    return (
        f"{wrapper} over ranks {listed(ranks)} would average different shards; {advice} (tensor-parallel "
        f"ranks {listed(peers)} each hold other rows or columns of '{name}')"
    )


def listed(ranks: Collection[int]) -> str:
    """Return numbers of ranks as a text, the middle of many left out."""
    shown = [str(rank) for rank in sorted(ranks)]
    return ", ".join(shown if len(shown) <= 16 else [*shown[:8], "...", shown[-1]])


Start = Callable[[ProcessGroup], Work]


def start_together(group: ProcessGroup, device: torch.device, starts: Sequence[Start]) -> list[Work]:
    """Start collectives in this order, in one launch where the backend supports it.

    One alone, too: NCCL sends it over another communicator than those of a launch, where its receiver may be.
    """
    if not group._get_backend(device).supports_coalescing:
        return [start(group) for start in starts]
    group._start_coalescing(device)
    for start in starts:
        start(group)
    return [group._end_coalescing(device)]


# ProcessGroup's own methods, because only they take a time-out; under names that torch 2.11 to 2.14 share.

_ALL_GATHER, _ALL_TO_ALL = c10d.AllgatherOptions(), c10d.AllToAllOptions()  # made once; nobody changes them


def start_all_reduce(
    group: ProcessGroup, data: Tensor, reduction: ReduceOp.RedOpType, timeout: timedelta | None
) -> Work:
    """Start an all-reduce of `data` in place. timeout: None for the group's own"""
    options = c10d.AllreduceOptions()
    options.reduceOp = ReduceOp(reduction)
    if timeout is not None:
        options.timeout = timeout
    return group.allreduce([data], options)


def start_reduce_scatter(
    group: ProcessGroup,
    shard: Tensor,
    data: Tensor,
    reduction: ReduceOp.RedOpType,
    timeout: timedelta | None,
) -> Work:
    """Start a reduce-scatter of `data` into `shard`, which may be this rank's part of `data`."""
    options = c10d.ReduceScatterOptions()
    options.reduceOp = ReduceOp(reduction)
    if timeout is not None:
        options.timeout = timeout
    return group._reduce_scatter_base(shard, data, options)


def start_all_gather(group: ProcessGroup, gathered: Tensor, part: Tensor) -> Work:
    """Start an all-gather of `part` into `gathered`, in the order of ranks."""
    return group._allgather_base(gathered, part, _ALL_GATHER)


def start_all_to_all(
    group: ProcessGroup, received: Tensor, sent: Tensor, received_rows: list[int], sent_rows: list[int]
) -> Work:
    """Start an all-to-all: rows of `sent` to each rank, of `received` from each, in the order of ranks."""
    return group.alltoall_base(received, sent, received_rows, sent_rows, _ALL_TO_ALL)


def start_broadcast(group: ProcessGroup, data: Tensor, group_source: int) -> Work:
    """Start a broadcast of `data` from the rank with number `group_source` in the group."""
    options = c10d.BroadcastOptions()
    options.rootRank = group_source
    return group.broadcast([data], options)


def exchange_device(group: ProcessGroup) -> torch.device:
    """Return the device of small messages between hosts: the CPU if the group's backend supports it.

    Else the GPU that the group is bound to (`device_id` of `init_process_group`), or the current one.
    """
    kinds = [device.type for device in group._device_types]
    if "cpu" in kinds:
        return torch.device("cpu")
    bound: torch.device | None = group.bound_device_id
    return bound or torch.device(kinds[0], torch.accelerator.current_device_index())


def _world_rank() -> int | str:
    return dist.get_rank() if dist.is_initialized() else "of no world"
