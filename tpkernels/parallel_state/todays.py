"""Functions of today's Megatron whose arguments or answers differ from those of Megatron-Core 0.16.

with_gtp_remat has no effect: no weights are gathered for each use; nor has partial_data_parallel: there is
one instance of the distributed optimizer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed import ProcessGroup

from tpkernels.parallel_state import table
from tpkernels.parallel_state.table import GroupOrNone, NamedGroup, data_group, public_names, state_for
from tpkernels.runtime.c10d import takes_cpu_tensors_by_gloo
from tpkernels.runtime.state import ParallelStateError

get_context_parallel_world_size = table.CONTEXT.world_size
get_context_parallel_rank = table.CONTEXT.rank
get_tensor_and_context_parallel_world_size = table.TENSOR_AND_CONTEXT.world_size
get_tensor_and_context_parallel_rank = table.TENSOR_AND_CONTEXT.rank
get_expert_model_parallel_world_size = table.EXPERT.world_size
get_expert_model_parallel_rank = table.EXPERT.rank
get_expert_tensor_parallel_world_size = table.EXPERT_TENSOR.world_size
get_expert_tensor_parallel_rank = table.EXPERT_TENSOR.rank
get_expert_tensor_and_model_parallel_world_size = table.EXPERT_TENSOR_AND_MODEL.world_size
get_expert_tensor_and_model_parallel_rank = table.EXPERT_TENSOR_AND_MODEL.rank
get_intra_distributed_optimizer_instance_group = table.OPTIMIZER_INSTANCE.group
"""All ranks: there is one instance."""


def get_data_parallel_group(
    with_context_parallel: bool = False, with_gtp_remat: bool = True, partial_data_parallel: bool = False
) -> ProcessGroup:
    """The ranks that hold the same shards of the model, and of the sequence unless with_context_parallel."""
    return data_group(with_context_parallel, partial_data_parallel).group()


def get_data_parallel_world_size(
    with_context_parallel: bool = False, with_gtp_remat: bool = True, partial_data_parallel: bool = False
) -> int:
    """The number of ranks in `get_data_parallel_group`."""
    return data_group(with_context_parallel, partial_data_parallel).world_size()


def get_data_parallel_rank(
    with_context_parallel: bool = False, with_gtp_remat: bool = True, partial_data_parallel: bool = False
) -> int:
    """This rank's position in `get_data_parallel_group`, or the one that was set."""
    return data_group(with_context_parallel, partial_data_parallel).rank()


def get_data_parallel_group_gloo(
    with_context_parallel: bool = False, partial_data_parallel: bool = False
) -> ProcessGroup:
    """The data group, if gloo moves its CPU tensors."""
    return _by_gloo(data_group(with_context_parallel, partial_data_parallel))


def get_expert_data_parallel_group(
    check_initialized: bool = True, with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
) -> GroupOrNone:
    """The ranks that hold the same shards of the same experts."""
    return table.EXPERT_DATA.group(check_initialized)


def get_expert_data_parallel_world_size(
    with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
) -> int:
    """The number of ranks in `get_expert_data_parallel_group`."""
    return table.EXPERT_DATA.world_size()


def get_expert_data_parallel_rank(
    with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
) -> int:
    """This rank's position in `get_expert_data_parallel_group`."""
    return table.EXPERT_DATA.rank()


def get_expert_data_parallel_group_gloo(partial_expert_data_parallel: bool = False) -> ProcessGroup:
    """The expert data group, if gloo moves its CPU tensors."""
    return _by_gloo(table.EXPERT_DATA)


def _by_gloo(row: NamedGroup) -> ProcessGroup:
    group = NamedGroup(row.kind, f"{row.said}-gloo").group()
    if not takes_cpu_tensors_by_gloo(group):
        raise ParallelStateError(
            f"the {row.kind} group does not move CPU tensors by gloo, and has no twin that does: make groups "
            'that do both, by init_process_group("cpu:gloo,cuda:nccl") or initialize_model_parallel(..., '
            'backend="cpu:gloo,cuda:nccl")'
        )
    return group


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
    size = table.DATA_AND_CONTEXT.world_size()
    if group_size != size:
        raise ParallelStateError(
            f"hybrid data and context parallel groups of {group_size} ranks do not exist, only that of all "
            f"{size} data and context ranks"
        )
    return table.DATA_AND_CONTEXT.group()


def _not_here(what: str, check_initialized: bool) -> None:
    if check_initialized:
        state_for(what)
        raise ParallelStateError(
            f"{what} is not initialized: it is not supported; check_initialized=False returns None"
        )


def get_all_ranks() -> str:
    """This rank's tensor, weight-gathering, data, context, pipeline and expert ranks, joined by "_"."""
    others = get_data_parallel_rank, get_context_parallel_rank, get_expert_model_parallel_rank
    return table.all_ranks(*others, remat=[lambda: 0])


if not TYPE_CHECKING:
    __all__ = public_names(globals())
