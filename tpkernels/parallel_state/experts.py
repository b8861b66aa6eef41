"""Experts, Megatron's combined groups, and groups of one rank for features that are not supported."""

from __future__ import annotations

from dataclasses import replace

from torch.distributed import ProcessGroup

from tpkernels.parallel_state.dense import (
    GroupOrNone,
    data_kind,
    get_data_parallel_group,
    group_for,
    rank_for,
    rank_or_none,
    size_for,
    size_or_none,
    state_for,
)
from tpkernels.runtime.c10d import takes_cpu_tensors_by_gloo
from tpkernels.runtime.state import ParallelStateError, current_or_none, on_the_fly, set_on_the_fly
from tpkernels.topology.plan import Kind

__all__ = [
    "get_expert_model_parallel_group",
    "get_expert_model_parallel_world_size",
    "get_expert_model_parallel_rank",
    "get_expert_model_parallel_src_rank",
    "set_expert_model_parallel_world_size",
    "set_expert_model_parallel_rank",
    "get_expert_tensor_parallel_group",
    "get_expert_tensor_parallel_world_size",
    "get_expert_tensor_parallel_rank",
    "set_expert_tensor_parallel_world_size",
    "set_expert_tensor_parallel_rank",
    "get_expert_tensor_and_model_parallel_group",
    "get_expert_tensor_and_model_parallel_world_size",
    "get_expert_tensor_and_model_parallel_rank",
    "get_expert_tensor_model_pipeline_parallel_group",
    "get_expert_data_parallel_group",
    "get_expert_data_parallel_world_size",
    "get_expert_data_parallel_rank",
    "get_expert_data_parallel_group_gloo",
    "get_data_parallel_group_gloo",
    "get_tensor_and_context_parallel_group",
    "get_tensor_and_context_parallel_world_size",
    "get_tensor_and_context_parallel_rank",
    "get_tensor_and_data_parallel_group",
    "get_amax_reduction_group",
    "get_intra_distributed_optimizer_instance_group",
    "get_inter_distributed_optimizer_instance_group",
    "get_hierarchical_context_parallel_groups",
    "get_hybrid_data_context_parallel_groups",
    "get_gtp_weight_remat_group",
    "get_gtp_weight_remat_world_size",
    "get_gtp_weight_remat_rank",
    "get_gtp_weight_remat_global_ranks",
    "get_expert_gtp_weight_remat_group",
    "get_expert_gtp_weight_remat_world_size",
    "get_expert_gtp_weight_remat_rank",
    "get_expert_gtp_weight_remat_global_ranks",
]

_EXPERT = "expert model parallel group"
_EXPERT_DATA = "expert data parallel group"
_EXPERT_TENSOR = "expert tensor parallel group"
_EXPERT_BOTH = "expert tensor and model parallel group"
_REMAT = "generalized tensor parallel group"


def get_expert_model_parallel_group(check_initialized: bool = True) -> GroupOrNone:
    return group_for(_EXPERT, "ep", check_initialized)


def get_expert_model_parallel_world_size() -> int:
    return size_for(_EXPERT, "ep", on_the_fly().expert_size)


def get_expert_model_parallel_rank() -> int:
    return rank_for(_EXPERT, "ep", on_the_fly().expert_rank)


def get_expert_model_parallel_src_rank() -> int:
    """The first global rank of this rank's expert group."""
    return state_for(_EXPERT).ranks("ep")[0]


def set_expert_model_parallel_world_size(world_size: int | None) -> None:
    set_on_the_fly(replace(on_the_fly(), expert_size=size_or_none(world_size)))


def set_expert_model_parallel_rank(rank: int | None) -> None:
    set_on_the_fly(replace(on_the_fly(), expert_rank=rank_or_none(rank)))


def get_expert_tensor_parallel_group(check_initialized: bool = True) -> GroupOrNone:
    """The ranks that one expert's weights are split over: those of the tensor group."""
    return group_for(_EXPERT_TENSOR, "expert_tp", check_initialized)


def get_expert_tensor_parallel_world_size() -> int:
    return size_for(_EXPERT_TENSOR, "expert_tp", on_the_fly().expert_tensor_size)


def get_expert_tensor_parallel_rank() -> int:
    return rank_for(_EXPERT_TENSOR, "expert_tp", on_the_fly().expert_tensor_rank)


def set_expert_tensor_parallel_world_size(world_size: int | None) -> None:
    set_on_the_fly(replace(on_the_fly(), expert_tensor_size=size_or_none(world_size)))


def set_expert_tensor_parallel_rank(rank: int | None) -> None:
    set_on_the_fly(replace(on_the_fly(), expert_tensor_rank=rank_or_none(rank)))


def get_expert_tensor_and_model_parallel_group(check_initialized: bool = True) -> GroupOrNone:
    return group_for(_EXPERT_BOTH, "expert_tp_ep", check_initialized)


def get_expert_tensor_and_model_parallel_world_size() -> int:
    return size_for(_EXPERT_BOTH, "expert_tp_ep")


def get_expert_tensor_and_model_parallel_rank() -> int:
    return rank_for(_EXPERT_BOTH, "expert_tp_ep")


def get_expert_tensor_model_pipeline_parallel_group(
    check_initialized: bool = True, with_egtp_remat: bool = False
) -> GroupOrNone:
    """with_egtp_remat: no effect: no weights are gathered for each use"""
    return group_for("expert tensor-model-pipeline parallel group", "expert_tp_ep_pp", check_initialized)


def get_expert_data_parallel_group(
    check_initialized: bool = True, with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
) -> GroupOrNone:
    """with_gtp_remat, partial_expert_data_parallel: no effect, see `get_data_parallel_group`"""
    return group_for(_EXPERT_DATA, "expert_dp", check_initialized)


def get_expert_data_parallel_world_size(
    with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
) -> int:
    return size_for(_EXPERT_DATA, "expert_dp")


def get_expert_data_parallel_rank(
    with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
) -> int:
    return rank_for(_EXPERT_DATA, "expert_dp")


def get_expert_data_parallel_group_gloo(partial_expert_data_parallel: bool = False) -> ProcessGroup:
    return _by_gloo(group_for(f"{_EXPERT_DATA}-gloo", "expert_dp"), "expert_dp")


def get_data_parallel_group_gloo(
    with_context_parallel: bool = False, partial_data_parallel: bool = False
) -> ProcessGroup:
    """The data group, if gloo moves its CPU tensors."""
    kind = data_kind(with_context_parallel, partial_data_parallel)
    return _by_gloo(group_for("data parallel group-gloo", kind), kind)


def _by_gloo(group: ProcessGroup, kind: Kind) -> ProcessGroup:
    if not takes_cpu_tensors_by_gloo(group):
        raise ParallelStateError(
            f"the {kind} group does not move CPU tensors by gloo, and has no twin that does: make groups "
            'that do both, by init_process_group("cpu:gloo,cuda:nccl") or initialize_model_parallel(..., '
            'backend="cpu:gloo,cuda:nccl")'
        )
    return group


def get_tensor_and_context_parallel_group(check_initialized: bool = True) -> GroupOrNone:
    return group_for("tensor and context parallel group", "tp_cp", check_initialized)


def get_tensor_and_context_parallel_world_size() -> int:
    return size_for("tensor and context parallel group", "tp_cp")


def get_tensor_and_context_parallel_rank() -> int:
    return rank_for("tensor and context parallel group", "tp_cp")


def get_tensor_and_data_parallel_group(
    check_initialized: bool = True, with_context_parallel: bool = False
) -> GroupOrNone:
    kind: Kind = "tp_dp_cp" if with_context_parallel else "tp_dp"
    return group_for("tensor and data parallel group", kind, check_initialized)


def get_amax_reduction_group(
    with_context_parallel: bool = False, tp_only_amax_red: bool = False
) -> ProcessGroup:
    """The ranks that share fp8 scales: tensor, data unless tp_only_amax_red, context if asked for."""
    kinds: tuple[Kind, Kind] = ("tp", "tp_cp") if tp_only_amax_red else ("tp_dp", "tp_dp_cp")
    return group_for("FP8 amax reduction group", kinds[with_context_parallel])


def get_intra_distributed_optimizer_instance_group(check_initialized: bool = True) -> GroupOrNone:
    """All ranks: there is one instance."""
    return group_for("intra distributed optimizer instance group", "world", check_initialized)


def get_inter_distributed_optimizer_instance_group(check_initialized: bool = True) -> None:
    """None: there is one instance. An error unless check_initialized is False, as in Megatron."""
    _not_here("inter distributed optimizer instance group", check_initialized)


def get_hierarchical_context_parallel_groups(check_initialized: bool = True) -> None:
    """None, or an error unless check_initialized is False, as in Megatron without these groups."""
    _not_here("hierarchical context parallel groups", check_initialized)


def get_hybrid_data_context_parallel_groups(
    check_initialized: bool = True, group_size: int | None = None
) -> ProcessGroup:
    """The data and context group, if it has group_size ranks; there are no smaller ones."""
    size = size_for("data parallel group", "dp_cp")
    if group_size != size:
        raise ParallelStateError(
            f"hybrid data and context parallel groups of {group_size} ranks do not exist, only that of all "
            f"{size} data and context ranks"
        )
    return get_data_parallel_group(with_context_parallel=True)


def _not_here(what: str, check_initialized: bool) -> None:
    if check_initialized:
        state_for(what)
        raise ParallelStateError(
            f"{what} is not initialized: it is not supported; check_initialized=False returns None"
        )


def get_gtp_weight_remat_group(check_initialized: bool = True) -> GroupOrNone:
    """The ranks that a weight is gathered from for each use: this rank alone."""
    return group_for(_REMAT, "alone", check_initialized)


def get_gtp_weight_remat_world_size() -> int:
    return size_for(_REMAT, "alone")


def get_gtp_weight_remat_rank() -> int:
    return rank_for(_REMAT, "alone")


def get_gtp_weight_remat_global_ranks(check_initialized: bool = True) -> list[int] | None:
    return None if _may_lack(check_initialized) else list(state_for(_REMAT).ranks("alone"))


def get_expert_gtp_weight_remat_group(check_initialized: bool = True) -> GroupOrNone:
    """As `get_gtp_weight_remat_group`, of experts."""
    return group_for(f"expert {_REMAT}", "alone", check_initialized)


def get_expert_gtp_weight_remat_world_size() -> int:
    return size_for(f"expert {_REMAT}", "alone")


def get_expert_gtp_weight_remat_rank() -> int:
    return rank_for(f"expert {_REMAT}", "alone")


def get_expert_gtp_weight_remat_global_ranks(check_initialized: bool = True) -> list[int] | None:
    return None if _may_lack(check_initialized) else list(state_for(f"expert {_REMAT}").ranks("alone"))


def _may_lack(check_initialized: bool) -> bool:
    return not check_initialized and current_or_none() is None
