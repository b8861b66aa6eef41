"""Whether this rank is a first, last or split stage of its pipeline, virtual stages included."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tpkernels.parallel_state.getters import (
    get_virtual_pipeline_model_parallel_rank,
    get_virtual_pipeline_model_parallel_world_size,
)
from tpkernels.parallel_state.table import PIPELINE, public_names, set_number, state_for
from tpkernels.runtime.state import current_or_none, on_the_fly


def set_pipeline_model_parallel_split_rank(rank: int | None) -> None:
    """Say which stage is the decoder's first."""
    set_number("split_rank", rank)


def get_pipeline_model_parallel_split_rank() -> int | None:
    """The first stage of the decoder, or None in a model without one."""
    state, changed = current_or_none(), on_the_fly().split_rank
    return changed if changed is not None or state is None else state.plan.split_rank


def is_pipeline_first_stage(ignore_virtual: bool = False, vp_stage: int | None = None) -> bool:
    """Whether this is the first stage, and of a virtual pipeline also its first virtual stage.

    ignore_virtual: the virtual stage does not count; the default is True in today's Megatron, and in
        `tpkernels.interop.megatron_core`
    vp_stage: the virtual stage asked about; by default the one that was set, at first 0
    """
    first = PIPELINE.rank() == 0
    return _at(first, lambda stage, stages: stage == 0, ignore_virtual, vp_stage)


def is_pipeline_last_stage(ignore_virtual: bool = False, vp_stage: int | None = None) -> bool:
    """Whether this is the last stage, and of a virtual pipeline also its last virtual stage.

    ignore_virtual, vp_stage: as in `is_pipeline_first_stage`
    """
    last = PIPELINE.rank() == PIPELINE.world_size() - 1
    return _at(last, lambda stage, stages: stage == stages - 1, ignore_virtual, vp_stage)


def is_rank_in_embedding_group(ignore_virtual: bool = False, vp_stage: int | None = None) -> bool:
    """Whether this rank holds the word embedding, and of a virtual pipeline in this virtual stage.

    ignore_virtual, vp_stage: as in `is_pipeline_first_stage`
    """
    state = state_for("embedding group")
    ranks = state.plan.members_near(state.rank, "embedding")

    def holds(stage: int | None, stages: int) -> bool:
        if state.rank == ranks[0]:
            return PIPELINE.rank() == 0 and stage == 0
        if state.rank == ranks[-1]:
            last = PIPELINE.world_size() - 1
            return PIPELINE.rank() == last and stage == stages - 1
        return True

    return _at(state.rank in ranks, holds, ignore_virtual, vp_stage)


def is_rank_in_position_embedding_group() -> bool:
    """Whether this rank holds the position embedding."""
    return state_for("position embedding group").is_member("position_embedding")


def _at(
    at_stage: bool, at: Callable[[int | None, int], bool], ignore_virtual: bool, vp_stage: int | None
) -> bool:
    """The answer for the pipeline stage, `at_stage`, and for the virtual stage, `at(stage, stages)`."""
    stages = get_virtual_pipeline_model_parallel_world_size()
    if vp_stage is not None and stages is not None and not 0 <= vp_stage < stages:
        raise ValueError(f"vp_stage: expected a virtual stage from 0 to {stages - 1}, got {vp_stage}")
    if not at_stage or ignore_virtual or stages is None:
        return at_stage
    return at(get_virtual_pipeline_model_parallel_rank() if vp_stage is None else vp_stage, stages)


def is_pipeline_stage_before_split(rank: int | None = None) -> bool:
    """Whether a stage (default: this rank's) belongs to the encoder. True in a model without a split."""
    if PIPELINE.world_size() == 1:
        return True
    stage = PIPELINE.rank() if rank is None else rank
    split = get_pipeline_model_parallel_split_rank()
    return split is None or stage < split


def is_pipeline_stage_after_split(rank: int | None = None) -> bool:
    """Whether a stage (default: this rank's) belongs to the decoder. True in a model without a split."""
    if PIPELINE.world_size() == 1:
        return True
    stage = PIPELINE.rank() if rank is None else rank
    split = get_pipeline_model_parallel_split_rank()
    return split is None or stage >= split


def is_pipeline_stage_at_split() -> bool:
    """Whether this is the encoder's last stage, and the next one belongs to the decoder."""
    stage = PIPELINE.rank()
    return is_pipeline_stage_before_split(stage) and is_pipeline_stage_after_split(stage + 1)


if not TYPE_CHECKING:
    __all__ = public_names(globals())
