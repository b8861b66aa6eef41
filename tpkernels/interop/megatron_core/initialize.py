"""Megatron-Core 0.16's functions that make and destroy groups, over our agreement of ranks."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import torch.distributed as dist
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
)

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
        _scratch_memory("_set_global_memory_buffer")
    except BaseException:
        destroy_model_parallel()
        raise


def destroy_model_parallel() -> None:
    """Destroy all groups and reset values that were set. Harmless when there are none."""
    _scratch_memory("destroy_global_memory_buffer")
    _scratch_memory("destroy_global_symmetric_memory_buffer")
    runtime.destroy_model_parallel()


def _scratch_memory(function: str) -> None:
    """Make or destroy the scratch tensors of Megatron's own module, if the import hook has put it aside."""
    aside = getattr(sys.modules.get("megatron.core.parallel_state"), "__aside__", None)
    if hasattr(aside, function):  # newer Megatrons have one buffer only
        getattr(aside, function)()


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
        configs.setdefault(name, {})["is_high_priority_stream"] = True
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
