"""Megatron's functions that make and destroy groups, with its arguments, over our agreement of ranks.

Also its global memory buffer: named scratch tensors that Megatron's own code takes from `parallel_state`.
tpkernels' layers do not use it: a second gather would overwrite the first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta
from importlib import import_module
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from tpkernels.groups import c10d
from tpkernels.groups import initialize as runtime
from tpkernels.groups import state as runtime_state
from tpkernels.groups.c10d import is_nccl
from tpkernels.groups.initialize import (
    GroupSettings,
    Listed,
    agree_and_create,
    as_text,
    create_listed_groups,
)
from tpkernels.groups.plan import COMBINED_KINDS, KINDS, GroupKind, GroupPlan
from tpkernels.groups.sizes import InvalidSizes, positive
from tpkernels.interop.megatron_core.rank_lists import (
    GLOO_TWINS,
    OPTION_NAMES,
    EmbeddingRanks,
    MegatronSizes,
    hierarchy,
    hybrid_sizes,
)
from tpkernels.parallel_state.table import public_names

_ALL_KINDS = (*KINDS, *COMBINED_KINDS)


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    pipeline_model_parallel_comm_backend: str | None = None,
    use_sharp: bool = False,
    context_parallel_size: int = 1,
    hierarchical_context_parallel_sizes: Sequence[int] | None = None,
    hybrid_context_parallel: bool = False,
    expert_model_parallel_size: int = 1,
    num_distributed_optimizer_instances: int = 1,
    expert_tensor_parallel_size: int | None = None,
    nccl_communicator_config_path: str | None = None,
    distributed_timeout_minutes: float = 30,
    order: str = "tp-cp-ep-dp-pp",
    get_embedding_ranks: EmbeddingRanks = None,
    get_position_embedding_ranks: EmbeddingRanks = None,
    create_gloo_process_groups: bool = True,
    high_priority_stream_groups: Sequence[str] | None = None,
    sharp_enabled_group: str | None = None,
    create_all_gather_group: bool | None = False,
    *,
    gtp_remat_size: int = 1,
    expert_gtp_remat_size: int = 1,
    rank_offset: int = 0,
    local_world_size: int | None = None,
) -> None:
    """Split the world into Megatron's groups and install them as this process's parallel state.

    Called by all ranks with the same arguments; if ranks disagree, all raise the same error.

    pipeline_model_parallel_comm_backend: None, or the backend of the default process group
    use_sharp, sharp_enabled_group: not supported: NCCL's environment decides
    get_embedding_ranks, get_position_embedding_ranks: return the ranks of a pipeline that hold an embedding
    distributed_timeout_minutes: 30, the default, stands for the time-out of the default process group
    create_gloo_process_groups: make gloo twins of data-parallel groups whose own backends do not move CPU
        tensors by gloo
    gtp_remat_size and after: arguments of newer Megatrons; only their defaults are supported
    """
    given = dict(locals())
    request = f"megatron_core.{as_text(initialize_model_parallel, given)}"
    expert_tensor = expert_tensor_parallel_size or tensor_model_parallel_size
    settings: dict[str, Any] = {}
    asked: list[MegatronSizes] = []
    options: dict[GroupKind, Any] = {}

    def plan(world_size: int) -> GroupPlan:
        _refuse(given)
        sizes = MegatronSizes(
            world_size=world_size,
            tensor=positive(tensor_model_parallel_size, "tensor_model_parallel_size"),
            pipeline=positive(pipeline_model_parallel_size, "pipeline_model_parallel_size"),
            context=positive(context_parallel_size, "context_parallel_size"),
            expert=positive(expert_model_parallel_size, "expert_model_parallel_size"),
            expert_tensor=positive(expert_tensor, "expert_tensor_parallel_size"),
            instances=positive(num_distributed_optimizer_instances, "num_distributed_optimizer_instances"),
            order=order,
            embedding=get_embedding_ranks,
            position_embedding=get_position_embedding_ranks,
            hierarchical=tuple(hierarchical_context_parallel_sizes or ()),
            hybrid=hybrid_context_parallel,
            all_gather_twin=bool(create_all_gather_group),
        )
        asked.append(sizes)
        settings.update(_communicators(nccl_communicator_config_path, high_priority_stream_groups))
        for kind in _ALL_KINDS:
            if found := settings.get(OPTION_NAMES.get(kind, kind)):
                options[kind] = found
        # a function chooses them per pipeline: rank 0's ranks may equal another kind's, others' not
        if get_embedding_ranks is not None:
            options.setdefault("embedding", None)
        if get_position_embedding_ranks is not None:
            options.setdefault("position_embedding", None)
        return sizes.checked(virtual_pipeline_model_parallel_size)

    limit = None if distributed_timeout_minutes == 30 else timedelta(minutes=distributed_timeout_minutes)
    state = agree_and_create(request, plan, GroupSettings(limit, None, options, _ALL_KINDS))
    try:
        needs_twins = create_gloo_process_groups and not c10d.takes_cpu_tensors_by_gloo(
            state.process_group("dp")
        )
        wanted = asked[0].further_groups(settings, GLOO_TWINS if needs_twins else ())
        if wanted:
            further = create_listed_groups(wanted, what="Megatron's groups", timeout=limit)
            runtime_state.install(replace(state, further=further))
        _set_global_memory_buffer()
    except BaseException:
        destroy_model_parallel()
        raise


def destroy_model_parallel() -> None:
    """Destroy all groups and reset values that were set. Harmless when there are none."""
    destroy_global_memory_buffer()
    destroy_global_symmetric_memory_buffer()
    runtime.destroy_model_parallel()


def create_all_gather_groups(
    for_expert_parallelism: bool = False,
    timeout: timedelta | None = None,
    nccl_comm_cfgs: Mapping[str, Mapping[str, Any]] | None = None,
) -> tuple[ProcessGroup, ProcessGroup | None]:
    """Make second communicators of the data and context ranks, and optionally of the expert data ranks.

    The caller owns them and destroys them by `torch.distributed.destroy_process_group`.
    """
    plan, configs = runtime_state.current().plan, nccl_comm_cfgs or {}
    wanted = {"dp_cp": Listed(plan.groups["dp_cp"], options=get_nccl_options("dp_cp", configs))}
    if for_expert_parallelism:
        wanted["ep_dp"] = Listed(plan.groups["expert_dp"], options=get_nccl_options("ep_dp", configs))
    made = create_listed_groups(wanted, what="create_all_gather_groups", timeout=timeout)
    return made["dp_cp"], made.get("ep_dp")


def create_group(
    ranks: Sequence[int] | None = None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
) -> ProcessGroup | object:
    """Make a group of `ranks`, by default all; other ranks get torch's `GroupMember.NON_GROUP_MEMBER`.

    use_local_synchronization: no effect: members make the group, and other ranks may call or not
    """
    members = range(dist.get_world_size()) if ranks is None else ranks
    name = group_desc or "group"
    made = create_listed_groups(
        {name: Listed([members], backend, pg_options)}, what="create_group", timeout=timeout
    )
    return made.get(name, dist.GroupMember.NON_GROUP_MEMBER)


def create_hierarchical_groups(
    rank: int,
    ranks: Sequence[int],
    hierarchical_group_sizes: Sequence[int],
    create_gloo_process_groups: bool = False,
    pg_options: Any = None,
    timeout: timedelta | None = None,
    group_desc: str | None = None,
) -> tuple[list[ProcessGroup], list[ProcessGroup | None]]:
    """Make this rank's groups by level, neighbours first, and their gloo twins; return empty lists elsewhere.

    rank: ignored: it is this process's rank
    """
    levels = hierarchy(ranks, hierarchical_group_sizes)
    options = pg_options if isinstance(pg_options, list) else [pg_options] * len(levels)
    wanted = {f"{group_desc} {i}": Listed(groups, None, options[i]) for i, groups in enumerate(levels)}
    if create_gloo_process_groups:
        wanted |= {f"{group_desc} {i} gloo": Listed(groups, "gloo") for i, groups in enumerate(levels)}
    made = create_listed_groups(wanted, what="create_hierarchical_groups", timeout=timeout)
    at = range(len(levels) if made else 0)
    return [made[f"{group_desc} {i}"] for i in at], [made.get(f"{group_desc} {i} gloo") for i in at]


def create_hybrid_dp_cp_groups(rank: int, ranks: Sequence[int], pg_options: Any) -> dict[int, ProcessGroup]:
    """Make groups of neighbours for each power of two; return this rank's by size. rank: ignored"""
    wanted = {
        str(size): Listed([ranks[i : i + size] for i in range(0, len(ranks), size)], None, pg_options)
        for size in hybrid_sizes(len(ranks))
    }
    if not wanted:
        return {}
    made = create_listed_groups(wanted, what="create_hybrid_dp_cp_groups")
    return {int(size): group for size, group in made.items()}


def update_pg_timeout(timeout: timedelta, pg: ProcessGroup | None = None) -> None:
    """Change the time-out of a group, by default of all groups of the parallel state, after a barrier."""
    state = runtime_state.current_or_none()
    dist.barrier(pg)
    groups = [pg] if pg is not None else [c10d.default_group()]
    if pg is None and state is not None:
        groups += [*state.process_groups.values(), *state.further.values()]
    for group in dict.fromkeys(groups):
        c10d.set_timeout(group, timeout)


def _refuse(given: Mapping[str, Any]) -> None:
    defaults = {
        "use_sharp": (False, "NCCL's environment variables decide"),
        "sharp_enabled_group": (None, "NCCL's environment variables decide"),
        "gtp_remat_size": (1, "weights are not gathered for each use"),
        "expert_gtp_remat_size": (1, "weights are not gathered for each use"),
        "rank_offset": (0, "groups are of the whole world; see HyperCommGrid for others"),
        "local_world_size": (None, "groups are of the whole world; see HyperCommGrid for others"),
    }
    for name, (default, why) in defaults.items():
        if given[name] != default:
            raise InvalidSizes(f"{name}: expected {default!r}, got {given[name]!r}: {why}")
    backend = given["pipeline_model_parallel_comm_backend"]
    if backend not in (None, dist.get_backend()):
        raise InvalidSizes(
            f"pipeline_model_parallel_comm_backend: expected None or {dist.get_backend()!r}, the backend of "
            f"the default process group, got {backend!r}"
        )


def _communicators(path: str | None, high_priority: Sequence[str] | None) -> dict[str, Any]:
    """NCCL's options by Megatron's names of groups."""
    configs: dict[str, Any] = {}
    if path is not None:
        yaml = import_module("yaml")  # optional: needed for this file alone
        configs = yaml.safe_load(Path(path).read_text()) or {}
    for name in high_priority or ():
        overwrite_nccl_comm_cfgs(configs, name, ("is_high_priority_stream", True))
    if configs and not is_nccl(None):
        raise InvalidSizes(
            f"settings for communicators of {', '.join(configs)}: expected NCCL as the default backend, "
            f"got {dist.get_backend()!r}"
        )
    return {name: get_nccl_options(name, configs) for name in configs}


def get_nccl_options(pg_name: str, nccl_comm_cfgs: Mapping[str, Mapping[str, Any]]) -> Any:
    """Return `ProcessGroupNCCL.Options` with the settings for `pg_name`; None without settings."""
    if pg_name not in nccl_comm_cfgs:
        return None
    if not dist.is_nccl_available():
        raise InvalidSizes(f"settings for the {pg_name} communicator: expected a torch with NCCL")
    settings = dict(nccl_comm_cfgs[pg_name])
    options = dist.ProcessGroupNCCL.Options(
        is_high_priority_stream=settings.pop("is_high_priority_stream", False)
    )
    for name, value in settings.items():
        if name not in ("cga_cluster_size", "max_ctas", "min_ctas", "net_name"):
            raise InvalidSizes(f"settings for the {pg_name} communicator: {name!r} is not known")
        if name == "net_name" and str(value).lower() not in ("ib", "socket"):
            raise InvalidSizes(f"net_name: expected 'IB' or 'socket', got {value!r}")
        setattr(options.config, name, value)
    return options


def overwrite_nccl_comm_cfgs(
    nccl_comm_cfgs: dict[str, Any], pg_name: str, key_value_pair: tuple[str, Any]
) -> None:
    """Set one setting of a communicator."""
    nccl_comm_cfgs.setdefault(pg_name, {})[key_value_pair[0]] = key_value_pair[1]


class GlobalMemoryBuffer:
    """One scratch tensor for each name and dtype, as large as the largest request."""

    def __init__(self) -> None:
        self.buffer: dict[tuple[str, torch.dtype], Tensor] = {}

    def get_tensor(
        self,
        tensor_shape: Sequence[int],
        dtype: torch.dtype,
        name: str,
        mem_alloc_context: Callable[[], AbstractContextManager[Any]] | None = None,
    ) -> Tensor:
        """Return the first elements of the scratch tensor in this shape, with arbitrary values.

        mem_alloc_context: makes the context in which memory is allocated
        """
        needed = prod(tensor_shape)
        held = self.buffer.get((name, dtype))
        if held is None or held.numel() < needed:
            with (mem_alloc_context or nullcontext)():
                device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
                held = self.buffer[name, dtype] = torch.empty(needed, dtype=dtype, device=device)
        return held[:needed].view(*tensor_shape)


class _Buffers:
    """The buffers that `get_global_memory_buffer` and its symmetric twin return."""

    plain: GlobalMemoryBuffer | None = None
    symmetric: Any = None  # Megatron's own


def _set_global_memory_buffer() -> None:
    """Make a new buffer, for a new parallel state."""
    _Buffers.plain = GlobalMemoryBuffer()


def get_global_memory_buffer() -> GlobalMemoryBuffer:
    """Return the buffer of the current parallel state, or raise."""
    if _Buffers.plain is None:
        raise runtime_state.ParallelStateError(
            "global memory buffer is not initialized: call initialize_model_parallel first"
        )
    return _Buffers.plain


def destroy_global_memory_buffer() -> None:
    """Drop the buffer of the current parallel state."""
    _Buffers.plain = None


def _set_global_symmetric_memory_buffer() -> None:
    """Make Megatron's own buffer, for its inference."""
    if _Buffers.symmetric is not None:
        raise runtime_state.ParallelStateError("global symmetric memory buffer is already initialized")
    buffer = import_module("megatron.core.utils").GlobalSymmetricMemoryBuffer
    _Buffers.symmetric = buffer(size_in_mb=256, process_group=runtime_state.current().process_group("tp"))


def get_global_symmetric_memory_buffer() -> Any:
    """Return Megatron's symmetric buffer, or raise."""
    if _Buffers.symmetric is None:
        raise runtime_state.ParallelStateError("global symmetric memory buffer is not initialized")
    return _Buffers.symmetric


def destroy_global_symmetric_memory_buffer() -> None:
    """Drop Megatron's symmetric buffer."""
    _Buffers.symmetric = None


if not TYPE_CHECKING:
    __all__ = public_names(globals())
