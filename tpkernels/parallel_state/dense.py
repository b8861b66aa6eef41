"""Tensor, pipeline, data and context parallelism: groups, sizes, ranks, and how they change on the fly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from tpkernels.runtime.state import (
    ParallelState,
    ParallelStateError,
    current_or_none,
    on_the_fly,
    set_on_the_fly,
)
from tpkernels.topology.plan import Kind
from tpkernels.topology.sizes import not_negative, positive

__all__ = [
    "model_parallel_is_initialized",
    "is_initialized",
    "get_model_parallel_group",
    "get_tensor_model_parallel_group",
    "get_pipeline_model_parallel_group",
    "get_data_parallel_group",
    "get_context_parallel_group",
    "get_context_parallel_global_ranks",
    "get_embedding_group",
    "get_position_embedding_group",
    "get_tensor_model_parallel_world_size",
    "get_tensor_model_parallel_rank",
    "get_pipeline_model_parallel_world_size",
    "get_pipeline_model_parallel_rank",
    "get_data_parallel_world_size",
    "get_data_parallel_rank",
    "get_context_parallel_world_size",
    "get_context_parallel_rank",
    "set_tensor_model_parallel_world_size",
    "set_tensor_model_parallel_rank",
    "set_pipeline_model_parallel_world_size",
    "set_pipeline_model_parallel_rank",
    "set_data_parallel_rank",
    "get_tensor_model_parallel_src_rank",
    "get_model_parallel_src_rank",
    "get_data_parallel_src_rank",
    "get_all_ranks",
]

_TENSOR = "intra_layer_model parallel group"
_PIPELINE = "pipeline_model parallel group"
_DATA = "data parallel group"
_CONTEXT = "context parallel group"


# None if check_initialized=False finds no group: Any, so that callers need not check for None otherwise.
GroupOrNone = ProcessGroup | Any


def state_for(what: str) -> ParallelState:
    state = current_or_none()
    if state is None:
        raise ParallelStateError(f"{what} is not initialized: call initialize_model_parallel(...) first")
    return state


def group_for(what: str, kind: Kind, check_initialized: bool = True) -> GroupOrNone:
    """This rank's group; without one an error, or None if check_initialized is False."""
    state = current_or_none()
    if not check_initialized and (state is None or not state.is_member(kind)):
        return None
    return state_for(what).process_group(kind)


def size_for(what: str, kind: Kind, on_the_fly: int | None = None) -> int:
    return state_for(what).size(kind) if on_the_fly is None else on_the_fly


def rank_for(what: str, kind: Kind, on_the_fly: int | None = None) -> int:
    return state_for(what).rank_in(kind) if on_the_fly is None else on_the_fly


def data_kind(with_context_parallel: bool, partial_data_parallel: bool = False) -> Kind:
    """partial_data_parallel: of one distributed-optimizer instance: there is one, over all data ranks"""
    if partial_data_parallel and not with_context_parallel:
        raise ValueError(
            "partial_data_parallel=True: expected with_context_parallel=True, for an instance of the "
            "distributed optimizer counts context ranks too"
        )
    return "dp_cp" if with_context_parallel else "dp"


def size_or_none(world_size: int | None) -> int | None:
    return None if world_size is None else positive(world_size, "world_size")


def rank_or_none(rank: int | None) -> int | None:
    return None if rank is None else not_negative(rank, "rank")


def model_parallel_is_initialized() -> bool:
    """Whether model and data parallel groups exist."""
    return current_or_none() is not None


def is_initialized() -> bool:
    """Whether data parallel groups exist: when model parallel groups do."""
    return model_parallel_is_initialized()


def get_model_parallel_group(check_initialized: bool = True) -> GroupOrNone:
    """The ranks that share one model: tensor x pipeline."""
    return group_for("model parallel group", "model", check_initialized)


def get_tensor_model_parallel_group(check_initialized: bool = True) -> GroupOrNone:
    return group_for(_TENSOR, "tp", check_initialized)


def get_pipeline_model_parallel_group(check_initialized: bool = True) -> GroupOrNone:
    return group_for(_PIPELINE, "pp", check_initialized)


def get_data_parallel_group(
    with_context_parallel: bool = False, with_gtp_remat: bool = True, partial_data_parallel: bool = False
) -> ProcessGroup:
    """with_gtp_remat: no effect: no weights are gathered for each use
    partial_data_parallel: no effect: there is one instance of the distributed optimizer
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
    set_on_the_fly(replace(on_the_fly(), tensor_size=size_or_none(world_size)))


def set_tensor_model_parallel_rank(rank: int | None) -> None:
    set_on_the_fly(replace(on_the_fly(), tensor_rank=rank_or_none(rank)))


def set_pipeline_model_parallel_world_size(world_size: int | None) -> None:
    set_on_the_fly(replace(on_the_fly(), pipeline_size=size_or_none(world_size)))


def set_pipeline_model_parallel_rank(rank: int | None) -> None:
    set_on_the_fly(replace(on_the_fly(), pipeline_rank=rank_or_none(rank)))


def set_data_parallel_rank(rank: int | None) -> None:
    set_on_the_fly(replace(on_the_fly(), data_rank=rank_or_none(rank)))


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
