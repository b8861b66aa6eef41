"""Pipeline stages as today's Megatron asks for them: by `vp_stage`, ignoring virtual stages unless told."""

from __future__ import annotations

import torch.distributed as dist

from tpkernels.parallel_state import stages
from tpkernels.parallel_state.dense import (
    get_pipeline_model_parallel_rank,
    get_pipeline_model_parallel_world_size,
)
from tpkernels.runtime.state import ParallelStateError, current_or_none

__all__ = [
    "is_pipeline_first_stage",
    "is_pipeline_last_stage",
    "is_rank_in_embedding_group",
    "is_rank_in_position_embedding_group",
]


def is_pipeline_first_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this is the first stage; unless ignore_virtual, whether `vp_stage` is the first of all."""
    last = _last_virtual(ignore_virtual, vp_stage)
    return get_pipeline_model_parallel_rank() == 0 and (last is None or vp_stage == 0)


def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this is the last stage; unless ignore_virtual, whether `vp_stage` is the last of all."""
    last = _last_virtual(ignore_virtual, vp_stage)
    at_stage = get_pipeline_model_parallel_rank() == get_pipeline_model_parallel_world_size() - 1
    return at_stage and (last is None or vp_stage == last)


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
    state = current_or_none()
    return state is not None and state.is_member("position_embedding")


def _last_virtual(ignore_virtual: bool, vp_stage: int | None) -> int | None:
    """The last virtual stage, where virtual stages count."""
    virtual = stages.get_virtual_pipeline_model_parallel_world_size()
    if ignore_virtual or virtual is None:
        return None
    if vp_stage is None:
        raise ParallelStateError("vp_stage must be passed if virtual pipeline is enabled")
    if not 0 <= vp_stage < virtual:
        raise ValueError(f"vp_stage: expected a virtual stage from 0 to {virtual - 1}, got {vp_stage}")
    return virtual - 1
