"""Tensor, pipeline, data and context parallelism: groups, sizes, ranks, and how they change on the fly."""

from __future__ import annotations

from dataclasses import replace

import torch.distributed as dist
from torch.distributed import ProcessGroup

from tpkernels.parallel_state.asking import GroupOrNone, data_kind, group_for, rank_for, size_for, state_for
from tpkernels.runtime.state import current_or_none, on_the_fly, set_on_the_fly
from tpkernels.topology.sizes import not_negative, positive

_TENSOR = "intra_layer_model parallel group"
_PIPELINE = "pipeline_model parallel group"
_DATA = "data parallel group"
_CONTEXT = "context parallel group"


def model_parallel_is_initialized() -> bool:
    """Whether model and data parallel groups exist."""
    return current_or_none() is not None


def is_initialized() -> bool:
    """Whether data parallel groups exist: when model parallel groups do."""
    return model_parallel_is_initialized()


def get_model_parallel_group(check_initialized: bool = True) -> GroupOrNone:
    """The ranks that hold one whole model together: tensor x pipeline."""
    return group_for("model parallel group", "model", check_initialized)


def get_tensor_model_parallel_group(check_initialized: bool = True) -> GroupOrNone:
    return group_for(_TENSOR, "tp", check_initialized)


def get_pipeline_model_parallel_group(check_initialized: bool = True) -> GroupOrNone:
    return group_for(_PIPELINE, "pp", check_initialized)


def get_data_parallel_group(
    with_context_parallel: bool = False, with_gtp_remat: bool = True, partial_data_parallel: bool = False
) -> ProcessGroup:
    """with_gtp_remat: the same group, for no weights are gathered for each use
    partial_data_parallel: the same group, for there is one instance of the distributed optimizer
    """
    return group_for(_DATA, data_kind(with_context_parallel, partial_data_parallel))


def get_context_parallel_group(check_initialized: bool = True) -> GroupOrNone:
    return group_for(_CONTEXT, "cp", check_initialized)


def get_context_parallel_global_ranks(check_initialized: bool = True) -> list[int] | None:
    """The global ranks of this rank's context group."""
    if not check_initialized and current_or_none() is None:
        return None
    return list(state_for(_CONTEXT).ranks("cp"))


def get_embedding_group(check_initialized: bool = True) -> GroupOrNone:
    """The stages of this pipeline that share the word embedding. On others an error, or None."""
    return group_for("embedding group", "embedding", check_initialized)


def get_position_embedding_group(check_initialized: bool = True) -> GroupOrNone:
    """The stages of this pipeline that share the position embedding. On others an error, or None."""
    return group_for("position embedding group", "position_embedding", check_initialized)


def get_tensor_model_parallel_world_size() -> int:
    return size_for(_TENSOR, "tp", on_the_fly().tensor_size)


def get_tensor_model_parallel_rank() -> int:
    return rank_for(_TENSOR, "tp", on_the_fly().tensor_rank)


def get_pipeline_model_parallel_world_size() -> int:
    return size_for(_PIPELINE, "pp", on_the_fly().pipeline_size)


def get_pipeline_model_parallel_rank() -> int:
    return rank_for(_PIPELINE, "pp", on_the_fly().pipeline_rank)


def get_data_parallel_world_size(
    with_context_parallel: bool = False, with_gtp_remat: bool = True, partial_data_parallel: bool = False
) -> int:
    return size_for(_DATA, data_kind(with_context_parallel, partial_data_parallel))


def get_data_parallel_rank(
    with_context_parallel: bool = False, with_gtp_remat: bool = True, partial_data_parallel: bool = False
) -> int:
    kind = data_kind(with_context_parallel, partial_data_parallel)
    return rank_for(_DATA, kind, on_the_fly().data_rank)


def get_context_parallel_world_size() -> int:
    return size_for(_CONTEXT, "cp")


def get_context_parallel_rank() -> int:
    return rank_for(_CONTEXT, "cp")


def set_tensor_model_parallel_world_size(world_size: int | None) -> None:
    world_size = None if world_size is None else positive(world_size, "world_size")
    set_on_the_fly(replace(on_the_fly(), tensor_size=world_size))


def set_tensor_model_parallel_rank(rank: int | None) -> None:
    rank = None if rank is None else not_negative(rank, "rank")
    set_on_the_fly(replace(on_the_fly(), tensor_rank=rank))


def set_pipeline_model_parallel_world_size(world_size: int | None) -> None:
    world_size = None if world_size is None else positive(world_size, "world_size")
    set_on_the_fly(replace(on_the_fly(), pipeline_size=world_size))


def set_pipeline_model_parallel_rank(rank: int | None) -> None:
    rank = None if rank is None else not_negative(rank, "rank")
    set_on_the_fly(replace(on_the_fly(), pipeline_rank=rank))


def set_data_parallel_rank(rank: int | None) -> None:
    rank = None if rank is None else not_negative(rank, "rank")
    set_on_the_fly(replace(on_the_fly(), data_rank=rank))


def get_tensor_model_parallel_src_rank() -> int:
    """The first global rank of this rank's tensor group."""
    state, size = current_or_none(), on_the_fly().tensor_size
    if size is None:
        return state_for(_TENSOR).ranks("tp")[0]
    rank = dist.get_rank() if state is None else state.rank
    return rank // size * size


def get_model_parallel_src_rank() -> int:
    """The first global rank of this rank's model group."""
    return state_for("Model parallel group").ranks("model")[0]


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    """The first global rank of this rank's data group."""
    return state_for("Data parallel group").ranks(data_kind(with_context_parallel))[0]


def get_all_ranks() -> str:
    """This rank's tensor, weight-gathering, data, context, pipeline and expert ranks, joined by "_"."""
    changed = on_the_fly()
    ranks = (
        get_tensor_model_parallel_rank(),
        0,
        get_data_parallel_rank(),
        get_context_parallel_rank(),
        get_pipeline_model_parallel_rank(),
        rank_for("expert model parallel group", "ep", changed.expert_rank),
    )
    return "_".join(map(str, ranks))
