"""Getters whose arguments or answers differ from those of `tpkernels.parallel_state`.

Keyword-only arguments are those of newer Megatrons. with_gtp_remat: no effect: no weights are gathered for
each use.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from tpkernels.interop.megatron_core.rank_lists import hybrid_sizes
from tpkernels.parallel_state import dense, experts
from tpkernels.parallel_state.dense import GroupOrNone, data_kind, group_for, state_for
from tpkernels.runtime.c10d import takes_cpu_tensors_by_gloo
from tpkernels.runtime.state import ParallelStateError, current_or_none, on_the_fly
from tpkernels.topology.plan import Kind

__all__ = [
    "get_all_ranks",
    "get_context_parallel_rank",
    "get_context_parallel_world_size",
    "get_data_modulo_expert_parallel_group",
    "get_data_parallel_group",
    "get_data_parallel_group_gloo",
    "get_data_parallel_rank",
    "get_data_parallel_world_size",
    "get_expert_data_parallel_group",
    "get_expert_data_parallel_group_gloo",
    "get_expert_data_parallel_rank",
    "get_expert_data_parallel_world_size",
    "get_expert_model_parallel_rank",
    "get_expert_model_parallel_world_size",
    "get_expert_tensor_and_model_parallel_rank",
    "get_expert_tensor_and_model_parallel_world_size",
    "get_expert_tensor_parallel_rank",
    "get_expert_tensor_parallel_world_size",
    "get_hierarchical_context_parallel_groups",
    "get_hybrid_data_context_parallel_groups",
    "get_inter_distributed_optimizer_instance_group",
    "get_intra_distributed_optimizer_instance_group",
    "get_tensor_and_context_parallel_rank",
    "get_tensor_and_context_parallel_world_size",
    "has_separate_all_gather_group",
    "is_unitialized",
]

_TWIN = "dp_cp_all_gather"


def further(name: str) -> ProcessGroup | None:
    """This rank's group of no kind in the plan, if it was made."""
    state = current_or_none()
    return None if state is None else state.further.get(name)


def is_unitialized() -> bool:
    """Whether there are no groups yet. The misspelling is the original's."""
    warnings.warn("is_unitialized is deprecated: use is_initialized", DeprecationWarning, stacklevel=2)
    return current_or_none() is None


def get_data_parallel_group(
    with_context_parallel: bool = False,
    partial_data_parallel: bool = False,
    independent_all_gather: bool = False,
    *,
    with_gtp_remat: bool = True,
) -> ProcessGroup:
    """partial_data_parallel: of one instance of the distributed optimizer
    independent_all_gather: the second communicator of these ranks, see `create_all_gather_group`
    """
    kind = data_kind(with_context_parallel, partial_data_parallel)
    if partial_data_parallel:
        return further("intra_dp_cp") or group_for("intra partial data parallel group", kind)
    if independent_all_gather and with_context_parallel:
        return _required(_TWIN, "initialize_model_parallel(create_all_gather_group=True)")
    return group_for("data parallel group", kind)


def has_separate_all_gather_group() -> bool:
    return further(_TWIN) is not None


def get_data_parallel_world_size(
    with_context_parallel: bool = False, partial_data_parallel: bool = False, *, with_gtp_remat: bool = True
) -> int:
    return _or_zero(lambda: get_data_parallel_group(with_context_parallel, partial_data_parallel).size())


def get_data_parallel_rank(
    with_context_parallel: bool = False, partial_data_parallel: bool = False, *, with_gtp_remat: bool = True
) -> int:
    changed = on_the_fly().data_rank
    if changed is not None:
        return changed
    return _or_zero(lambda: get_data_parallel_group(with_context_parallel, partial_data_parallel).rank())


def get_expert_data_parallel_group(
    check_initialized: bool = True,
    partial_expert_data_parallel: bool = False,
    *,
    with_gtp_remat: bool = True,
) -> GroupOrNone:
    """partial_expert_data_parallel: of one instance of the distributed optimizer"""
    intra = further("intra_expert_dp") if partial_expert_data_parallel else None
    return intra or group_for("expert data parallel group", "expert_dp", check_initialized)


def get_data_modulo_expert_parallel_group(partial_expert_data_parallel: bool = False) -> ProcessGroup:
    warnings.warn(
        "get_data_modulo_expert_parallel_group is deprecated: use get_expert_data_parallel_group",
        DeprecationWarning,
        stacklevel=2,
    )
    return get_expert_data_parallel_group(partial_expert_data_parallel=partial_expert_data_parallel)


def get_expert_data_parallel_world_size(
    partial_expert_data_parallel: bool = False, *, with_gtp_remat: bool = True
) -> int:
    return _or_zero(lambda: get_expert_data_parallel_group(True, partial_expert_data_parallel).size())


def get_expert_data_parallel_rank(
    partial_expert_data_parallel: bool = False, *, with_gtp_remat: bool = True
) -> int:
    return _or_zero(lambda: get_expert_data_parallel_group(True, partial_expert_data_parallel).rank())


def get_data_parallel_group_gloo(
    with_context_parallel: bool = False, partial_data_parallel: bool = False
) -> ProcessGroup:
    """The group itself if gloo moves its CPU tensors, else its twin by gloo."""
    kind = data_kind(with_context_parallel, partial_data_parallel)
    return _by_gloo("intra_dp_cp" if partial_data_parallel else kind, kind)


def get_expert_data_parallel_group_gloo(partial_expert_data_parallel: bool = False) -> ProcessGroup:
    """The group itself if gloo moves its CPU tensors, else its twin by gloo."""
    return _by_gloo("intra_expert_dp" if partial_expert_data_parallel else "expert_dp", "expert_dp")


def get_intra_distributed_optimizer_instance_group(check_initialized: bool = True) -> GroupOrNone:
    """The ranks of one instance of the distributed optimizer."""
    found = further("intra_dist_opt")
    return found or group_for("intra distributed optimizer instance group", "world", check_initialized)


def get_inter_distributed_optimizer_instance_group(check_initialized: bool = True) -> GroupOrNone:
    """The same shard in each instance of the distributed optimizer. With one instance an error, or None."""
    if not check_initialized:
        return further("inter_dist_opt")
    return _required("inter_dist_opt", "initialize_model_parallel(num_distributed_optimizer_instances=2)")


def get_hierarchical_context_parallel_groups(check_initialized: bool = True) -> list[ProcessGroup] | None:
    """This rank's context groups by level, neighbours first. Without them an error, or None."""
    state = current_or_none()
    made = {} if state is None else state.further
    found = [group for name, group in made.items() if name.startswith("hcp_") and name[4:].isdigit()]
    if check_initialized and not found:
        _required("hcp_0", "initialize_model_parallel(hierarchical_context_parallel_sizes=[...])")
    return found or None


def get_hybrid_data_context_parallel_groups(
    check_initialized: bool = True, group_size: int | None = None
) -> GroupOrNone:
    """This rank's group of `group_size` data and context ranks."""
    all_of_them = state_for("data parallel group").size("dp_cp")
    if group_size == all_of_them:
        return group_for("data parallel group", "dp_cp")
    if group_size not in hybrid_sizes(all_of_them):
        raise ValueError(
            f"group_size: expected one of {[*hybrid_sizes(all_of_them), all_of_them]}, got {group_size}"
        )
    return _required(f"hybrid_{group_size}", "initialize_model_parallel(hybrid_context_parallel=True)")


def get_context_parallel_world_size() -> int:
    return _or_zero(dense.get_context_parallel_world_size)


def get_context_parallel_rank() -> int:
    return _or_zero(dense.get_context_parallel_rank)


def get_tensor_and_context_parallel_world_size() -> int:
    return _or_zero(experts.get_tensor_and_context_parallel_world_size)


def get_tensor_and_context_parallel_rank() -> int:
    return _or_zero(experts.get_tensor_and_context_parallel_rank)


def get_expert_model_parallel_world_size() -> int:
    return _or_zero(experts.get_expert_model_parallel_world_size)


def get_expert_model_parallel_rank() -> int:
    return _or_zero(experts.get_expert_model_parallel_rank)


def get_expert_tensor_parallel_world_size() -> int | None:
    """Without groups the tensor-parallel size that was set, or None."""
    own = on_the_fly().expert_tensor_size
    lacking = current_or_none() is None and own is None
    return on_the_fly().tensor_size if lacking else experts.get_expert_tensor_parallel_world_size()


def get_expert_tensor_parallel_rank() -> int | None:
    """Without groups the tensor-parallel rank that was set, or None."""
    own = on_the_fly().expert_tensor_rank
    lacking = current_or_none() is None and own is None
    return on_the_fly().tensor_rank if lacking else experts.get_expert_tensor_parallel_rank()


def get_expert_tensor_and_model_parallel_world_size() -> int:
    return _or_zero(experts.get_expert_tensor_and_model_parallel_world_size)


def get_expert_tensor_and_model_parallel_rank() -> int:
    return _or_zero(experts.get_expert_tensor_and_model_parallel_rank)


def get_all_ranks() -> str:
    """This rank's tensor, data, context, pipeline and expert ranks, joined by "_"."""
    ranks = (
        dense.get_tensor_model_parallel_rank(),
        get_data_parallel_rank(),
        get_context_parallel_rank(),
        dense.get_pipeline_model_parallel_rank(),
        get_expert_model_parallel_rank(),
    )
    return "_".join(map(str, ranks))


def _or_zero(measure: Callable[[], Any]) -> int:
    """Zero where torch.distributed is not initialized."""
    try:
        return int(measure())
    except ParallelStateError:
        if dist.is_available() and dist.is_initialized():
            raise
        return 0


def _required(name: str, made_by: str) -> ProcessGroup:
    found = further(name)
    if found is None:
        state_for(name)
        raise ParallelStateError(f"the {name} group is not initialized: it is made by {made_by}")
    return found


def _by_gloo(name: str, kind: Kind) -> ProcessGroup:
    group = further(name) or group_for(f"{kind} group-gloo", kind)
    if takes_cpu_tensors_by_gloo(group):
        return group
    twin = further(f"{name}_gloo") or further(f"{kind}_gloo")
    if twin is None:
        raise ParallelStateError(
            f"the {name} group has no twin that moves CPU tensors by gloo: call "
            "initialize_model_parallel(create_gloo_process_groups=True)"
        )
    return twin
