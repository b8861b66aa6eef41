"""The functions of Megatron-Core 0.16's `parallel_state`, with its arguments and results.

Most are those of `tpkernels.parallel_state`. Here are functions that differ between Megatrons (arguments of
data-parallel getters, `vp_stage`), and those of groups that only Megatron's own code asks for: instances of
the distributed optimizer, gloo twins, second communicators. Before torch.distributed is initialized sizes
and ranks are zero: Megatron relies on it. Newer Megatrons' arguments are keyword-only.
with_gtp_remat: no effect: no weights are gathered for each use.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from tpkernels import parallel_state as face
from tpkernels.groups.c10d import takes_cpu_tensors_by_gloo
from tpkernels.groups.plan import GroupKind
from tpkernels.groups.state import ParallelStateError, current_or_none, overwritten
from tpkernels.interop.megatron_core.initialize import create_all_gather_groups as create_all_gather_groups
from tpkernels.interop.megatron_core.initialize import destroy_model_parallel as destroy_model_parallel
from tpkernels.interop.megatron_core.initialize import get_nccl_options as get_nccl_options
from tpkernels.interop.megatron_core.initialize import initialize_model_parallel as initialize_model_parallel
from tpkernels.interop.megatron_core.initialize import update_pg_timeout as update_pg_timeout
from tpkernels.interop.megatron_core.rank_lists import hybrid_sizes
from tpkernels.parallel_state import GroupOrNone, NamedGroup, data_group, state_for


def _further(name: str) -> ProcessGroup | None:
    """Return this rank's further group `name`, of no kind in the plan; None if it was not made."""
    state = current_or_none()
    return None if state is None else state.further.get(name)


def _or_zero(measure: Callable[[], int]) -> Callable[[], int]:
    """`measure`, which returns zero where torch.distributed is not initialized."""

    @wraps(measure, assigned=("__name__", "__doc__"))
    def measured() -> int:
        try:
            return measure()
        except ParallelStateError:
            if dist.is_available() and dist.is_initialized():
                raise
            return 0

    return measured


get_context_parallel_world_size = _or_zero(face.CONTEXT.world_size)
get_context_parallel_rank = _or_zero(face.CONTEXT.rank)
get_tensor_and_context_parallel_world_size = _or_zero(face.TENSOR_AND_CONTEXT.world_size)
get_tensor_and_context_parallel_rank = _or_zero(face.TENSOR_AND_CONTEXT.rank)
get_expert_model_parallel_world_size = _or_zero(face.EXPERT.world_size)
get_expert_model_parallel_rank = _or_zero(face.EXPERT.rank)
get_expert_tensor_and_model_parallel_world_size = _or_zero(face.EXPERT_TENSOR_AND_MODEL.world_size)
get_expert_tensor_and_model_parallel_rank = _or_zero(face.EXPERT_TENSOR_AND_MODEL.rank)


def get_data_parallel_group(
    with_context_parallel: bool = False,
    partial_data_parallel: bool = False,
    independent_all_gather: bool = False,
    *,
    with_gtp_remat: bool = True,
) -> ProcessGroup:
    """The group that holds the same shards of the model, and of the sequence unless with_context_parallel.

    partial_data_parallel: only the ranks of one instance of the distributed optimizer
    independent_all_gather: the second communicator of these ranks, see `create_all_gather_group`
    """
    row = data_group(with_context_parallel, partial_data_parallel)
    if partial_data_parallel:
        return _further("intra_dp_cp") or NamedGroup(row.kind, "intra partial data parallel group").group()
    if independent_all_gather and with_context_parallel:
        return _required("dp_cp_all_gather", "initialize_model_parallel(create_all_gather_group=True)")
    return row.group()


def has_separate_all_gather_group() -> bool:
    """Whether the data and context ranks have a second communicator."""
    return _further("dp_cp_all_gather") is not None


def get_data_parallel_world_size(
    with_context_parallel: bool = False, partial_data_parallel: bool = False, *, with_gtp_remat: bool = True
) -> int:
    """The number of ranks in `get_data_parallel_group`."""
    return _or_zero(lambda: get_data_parallel_group(with_context_parallel, partial_data_parallel).size())()


def get_data_parallel_rank(
    with_context_parallel: bool = False, partial_data_parallel: bool = False, *, with_gtp_remat: bool = True
) -> int:
    """This rank's position in `get_data_parallel_group`, or the rank that was set."""
    changed = overwritten().get("data_rank")
    if changed is not None:
        return changed
    return _or_zero(lambda: get_data_parallel_group(with_context_parallel, partial_data_parallel).rank())()


def get_expert_data_parallel_group(
    check_initialized: bool = True,
    partial_expert_data_parallel: bool = False,
    *,
    with_gtp_remat: bool = True,
) -> GroupOrNone:
    """The group that holds the same shards of the same experts.

    partial_expert_data_parallel: only the ranks of one instance of the distributed optimizer
    """
    intra = _further("intra_expert_dp") if partial_expert_data_parallel else None
    return intra or face.EXPERT_DATA.group(check_initialized)


def get_expert_data_parallel_world_size(
    partial_expert_data_parallel: bool = False, *, with_gtp_remat: bool = True
) -> int:
    """The number of ranks in `get_expert_data_parallel_group`."""
    return _or_zero(lambda: get_expert_data_parallel_group(True, partial_expert_data_parallel).size())()


def get_expert_data_parallel_rank(
    partial_expert_data_parallel: bool = False, *, with_gtp_remat: bool = True
) -> int:
    """This rank's position in `get_expert_data_parallel_group`."""
    return _or_zero(lambda: get_expert_data_parallel_group(True, partial_expert_data_parallel).rank())()


def get_data_parallel_group_gloo(
    with_context_parallel: bool = False, partial_data_parallel: bool = False
) -> ProcessGroup:
    """The group itself if gloo moves its CPU tensors, else its twin by gloo."""
    kind = data_group(with_context_parallel, partial_data_parallel).kind
    return _by_gloo("intra_dp_cp" if partial_data_parallel else kind, kind)


def get_expert_data_parallel_group_gloo(partial_expert_data_parallel: bool = False) -> ProcessGroup:
    """The group itself if gloo moves its CPU tensors, else its twin by gloo."""
    return _by_gloo("intra_expert_dp" if partial_expert_data_parallel else "expert_dp", "expert_dp")


def get_intra_distributed_optimizer_instance_group(check_initialized: bool = True) -> GroupOrNone:
    """The group of one instance of the distributed optimizer."""
    return _further("intra_dist_opt") or face.OPTIMIZER_INSTANCE.group(check_initialized)


def get_inter_distributed_optimizer_instance_group(check_initialized: bool = True) -> GroupOrNone:
    """The group that holds one shard in each instance of the distributed optimizer; raises for one instance.

    check_initialized: False: return None instead
    """
    if not check_initialized:
        return _further("inter_dist_opt")
    return _required("inter_dist_opt", "initialize_model_parallel(num_distributed_optimizer_instances=2)")


def get_hierarchical_context_parallel_groups(check_initialized: bool = True) -> list[ProcessGroup] | None:
    """This rank's context groups by level, neighbours first; without them it raises, or returns None."""
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
    all_of_them = face.DATA_AND_CONTEXT.world_size()
    if group_size == all_of_them:
        return face.DATA_AND_CONTEXT.group()
    if group_size not in hybrid_sizes(all_of_them):
        raise ValueError(
            f"group_size: expected one of {[*hybrid_sizes(all_of_them), all_of_them]}, got {group_size}"
        )
    return _required(f"hybrid_{group_size}", "initialize_model_parallel(hybrid_context_parallel=True)")


def get_expert_tensor_parallel_world_size() -> int | None:
    """The number of ranks that split an expert; without groups the tensor size that was set, or None."""
    if current_or_none() is None and "expert_tensor_size" not in overwritten():
        return overwritten().get("tensor_size")
    return face.EXPERT_TENSOR.world_size()


def get_expert_tensor_parallel_rank() -> int | None:
    """This rank among those that split an expert; without groups the tensor rank that was set, or None."""
    if current_or_none() is None and "expert_tensor_rank" not in overwritten():
        return overwritten().get("tensor_rank")
    return face.EXPERT_TENSOR.rank()


def get_all_ranks() -> str:
    """This rank's tensor, data, context, pipeline and expert ranks, joined by "_"."""
    context, expert = get_context_parallel_rank(), get_expert_model_parallel_rank()
    ranks = face.TENSOR.rank(), get_data_parallel_rank(), context, face.PIPELINE.rank(), expert
    return "_".join(map(str, ranks))


def _required(name: str, made_by: str) -> ProcessGroup:
    found = _further(name)
    if found is None:
        state_for(name)
        raise ParallelStateError(f"the {name} group is not initialized: it is made by {made_by}")
    return found


def _by_gloo(name: str, kind: GroupKind) -> ProcessGroup:
    group = _further(name) or NamedGroup(kind, f"{kind} group-gloo").group()
    if takes_cpu_tensors_by_gloo(group):
        return group
    twin = _further(f"{name}_gloo") or _further(f"{kind}_gloo")
    if twin is None:
        raise ParallelStateError(
            f"the {name} group has no twin that moves CPU tensors by gloo: call "
            "initialize_model_parallel(create_gloo_process_groups=True)"
        )
    return twin


# Stages: `vp_stage` counts unless ignore_virtual.


def is_pipeline_first_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this is the first stage; unless ignore_virtual, whether `vp_stage` is the first virtual one."""
    return face.is_pipeline_first_stage(ignore_virtual, _counted_stage(ignore_virtual, vp_stage))


def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this is the last stage; unless ignore_virtual, whether `vp_stage` is the last virtual one."""
    return face.is_pipeline_last_stage(ignore_virtual, _counted_stage(ignore_virtual, vp_stage))


def is_rank_in_embedding_group(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this rank holds the word embedding; unless ignore_virtual, in the virtual stage `vp_stage`."""
    state = current_or_none()
    ranks = () if state is None else state.plan.members_near(state.rank, "embedding")
    if dist.get_rank() not in ranks or ignore_virtual:
        return dist.get_rank() in ranks
    if dist.get_rank() == ranks[0]:
        return is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
    if dist.get_rank() == ranks[-1]:
        return is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
    return True


def is_rank_in_position_embedding_group() -> bool:
    """Whether this rank holds the position embedding."""
    state = current_or_none()
    return state is not None and state.is_member("position_embedding")


def _counted_stage(ignore_virtual: bool, vp_stage: int | None) -> int | None:
    """Return `vp_stage` if virtual stages count, else None; raise if it is needed and missing."""
    if ignore_virtual or "virtual_size" not in overwritten():
        return None
    if vp_stage is None:
        raise ParallelStateError("vp_stage must be passed if virtual pipeline is enabled")
    return vp_stage


def __getattr__(name: str) -> Any:
    """Groups under Megatron's private variables, which some programs read; setting one changes nothing."""
    if name == "_DATA_PARALLEL_GROUP_WITH_CP_AG":
        return _further("dp_cp_all_gather")
    if name in ("_DATA_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP_WITH_CP"):
        return data_group(with_context_parallel=name.endswith("CP")).group(check_initialized=False)
    getter = globals().get(f"get{name.lower()}") if name.endswith("_GROUP") and name.isupper() else None
    if getter is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getter(check_initialized=False)


if TYPE_CHECKING:
    from tpkernels.parallel_state import *  # type: ignore[assignment]  # noqa: F403
else:
    globals().update({name: getattr(face, name) for name in face.__all__} | globals())
    _PREFIXES = ("get_", "set_", "is_", "model_parallel_is_", "initialize_model_", "destroy_model_")
    _PREFIXES += ("has_separate_", "create_all_", "update_pg_")
    __all__ = [name for name in dir() if name.startswith(_PREFIXES)]
