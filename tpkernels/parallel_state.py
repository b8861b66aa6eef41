"""Megatron's `parallel_state` by name, argument and answer, over the state in `tpkernels.runtime`.

Getters before `initialize_model_parallel` raise `ParallelStateError`, which is both the `RuntimeError` and
the `AssertionError` that callers may catch. The `set_...` functions change sizes and ranks on the fly, with
or without an initialized state; None takes a change back (of the virtual rank: to None).
"""

from __future__ import annotations

from dataclasses import replace

import torch.distributed as dist
from torch.distributed import ProcessGroup

from tpkernels.runtime.initialize import destroy_model_parallel, initialize_model_parallel
from tpkernels.runtime.state import (
    ParallelState,
    ParallelStateError,
    current_or_none,
    on_the_fly,
    set_on_the_fly,
)
from tpkernels.topology.grid import Ranks
from tpkernels.topology.plan import Kind
from tpkernels.topology.sizes import not_negative, positive

__all__ = [
    "initialize_model_parallel",
    "model_parallel_is_initialized",
    "destroy_model_parallel",
    # groups
    "get_model_parallel_group",
    "get_tensor_model_parallel_group",
    "get_pipeline_model_parallel_group",
    "get_data_parallel_group",
    "get_context_parallel_group",
    "get_expert_model_parallel_group",
    "get_expert_data_parallel_group",
    "get_embedding_group",
    "get_position_embedding_group",
    # sizes and ranks
    "get_tensor_model_parallel_world_size",
    "get_tensor_model_parallel_rank",
    "get_pipeline_model_parallel_world_size",
    "get_pipeline_model_parallel_rank",
    "get_data_parallel_world_size",
    "get_data_parallel_rank",
    "get_context_parallel_world_size",
    "get_context_parallel_rank",
    "get_expert_model_parallel_world_size",
    "get_expert_model_parallel_rank",
    # changes on the fly
    "set_tensor_model_parallel_world_size",
    "set_tensor_model_parallel_rank",
    "set_pipeline_model_parallel_world_size",
    "set_pipeline_model_parallel_rank",
    "set_pipeline_model_parallel_split_rank",
    "set_virtual_pipeline_model_parallel_rank",
    # where this rank stands
    "get_pipeline_model_parallel_split_rank",
    "get_virtual_pipeline_model_parallel_rank",
    "get_virtual_pipeline_model_parallel_world_size",
    "is_pipeline_first_stage",
    "is_pipeline_last_stage",
    "is_rank_in_embedding_group",
    "is_rank_in_position_embedding_group",
    "is_pipeline_stage_before_split",
    "is_pipeline_stage_after_split",
    "is_pipeline_stage_at_split",
    # global ranks of neighbours
    "get_tensor_model_parallel_src_rank",
    "get_data_parallel_src_rank",
    "get_pipeline_model_parallel_first_rank",
    "get_pipeline_model_parallel_last_rank",
    "get_pipeline_model_parallel_next_rank",
    "get_pipeline_model_parallel_prev_rank",
]


def _state(what: str) -> ParallelState:
    state = current_or_none()
    if state is None:
        raise ParallelStateError(f"{what} is not initialized: call initialize_model_parallel(...) first")
    return state


def model_parallel_is_initialized() -> bool:
    """Whether model and data parallel groups exist."""
    return current_or_none() is not None


def get_model_parallel_group() -> ProcessGroup:
    """The ranks that hold one whole model together: tensor x pipeline."""
    return _state("model parallel group").process_group("model")


def get_tensor_model_parallel_group() -> ProcessGroup:
    return _state("intra_layer_model parallel group").process_group("tp")


def get_pipeline_model_parallel_group() -> ProcessGroup:
    return _state("pipeline_model parallel group").process_group("pp")


def get_data_parallel_group(with_context_parallel: bool = False) -> ProcessGroup:
    return _state("data parallel group").process_group(_data_kind(with_context_parallel))


def get_context_parallel_group() -> ProcessGroup:
    return _state("context parallel group").process_group("cp")


def get_expert_model_parallel_group() -> ProcessGroup:
    return _state("expert model parallel group").process_group("ep")


def get_expert_data_parallel_group() -> ProcessGroup:
    return _state("expert data parallel group").process_group("expert_dp")


def get_embedding_group() -> ProcessGroup:
    """The stages of this pipeline that share the word embedding. An error on any other stage."""
    return _state("embedding group").process_group("embedding")


def get_position_embedding_group() -> ProcessGroup:
    """The stages of this pipeline that share the position embedding. An error on any other stage."""
    return _state("position embedding group").process_group("position_embedding")


def get_tensor_model_parallel_world_size() -> int:
    size = on_the_fly().tensor_size
    return _state("intra_layer_model parallel group").size("tp") if size is None else size


def get_tensor_model_parallel_rank() -> int:
    rank = on_the_fly().tensor_rank
    return _state("intra_layer_model parallel group").rank_in("tp") if rank is None else rank


def get_pipeline_model_parallel_world_size() -> int:
    size = on_the_fly().pipeline_size
    return _state("pipeline_model parallel group").size("pp") if size is None else size


def get_pipeline_model_parallel_rank() -> int:
    rank = on_the_fly().pipeline_rank
    return _state("pipeline_model parallel group").rank_in("pp") if rank is None else rank


def get_data_parallel_world_size(with_context_parallel: bool = False) -> int:
    return _state("data parallel group").size(_data_kind(with_context_parallel))


def get_data_parallel_rank(with_context_parallel: bool = False) -> int:
    return _state("data parallel group").rank_in(_data_kind(with_context_parallel))


def get_context_parallel_world_size() -> int:
    return _state("context parallel group").size("cp")


def get_context_parallel_rank() -> int:
    return _state("context parallel group").rank_in("cp")


def get_expert_model_parallel_world_size() -> int:
    return _state("expert model parallel group").size("ep")


def get_expert_model_parallel_rank() -> int:
    return _state("expert model parallel group").rank_in("ep")


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


def set_pipeline_model_parallel_split_rank(rank: int | None) -> None:
    rank = None if rank is None else not_negative(rank, "rank")
    set_on_the_fly(replace(on_the_fly(), split_rank=rank))


def set_virtual_pipeline_model_parallel_rank(rank: int | None) -> None:
    rank = None if rank is None else not_negative(rank, "rank")
    set_on_the_fly(replace(on_the_fly(), virtual_rank=rank))


def get_pipeline_model_parallel_split_rank() -> int | None:
    """The first stage of the decoder, or None in a model without one."""
    state, changed = current_or_none(), on_the_fly().split_rank
    return changed if changed is not None or state is None else state.plan.split_rank


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    return on_the_fly().virtual_rank


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    state = current_or_none()
    return None if state is None else state.plan.virtual_pipeline


def is_pipeline_first_stage(ignore_virtual: bool = False) -> bool:
    """Whether this is the first stage, and with a virtual pipeline also its first virtual stage."""
    virtual_size = None if ignore_virtual else get_virtual_pipeline_model_parallel_world_size()
    if virtual_size is not None and get_virtual_pipeline_model_parallel_rank() != 0:
        return False
    return get_pipeline_model_parallel_rank() == 0


def is_pipeline_last_stage(ignore_virtual: bool = False) -> bool:
    """Whether this is the last stage, and with a virtual pipeline also its last virtual stage."""
    virtual_size = None if ignore_virtual else get_virtual_pipeline_model_parallel_world_size()
    if virtual_size is not None and get_virtual_pipeline_model_parallel_rank() != virtual_size - 1:
        return False
    return get_pipeline_model_parallel_rank() == get_pipeline_model_parallel_world_size() - 1


def is_rank_in_embedding_group(ignore_virtual: bool = False) -> bool:
    """Whether this rank holds the word embedding, in the virtual stage being worked on."""
    state = _state("embedding group")
    ranks = state.plan.members_near(state.rank, "embedding")
    if ignore_virtual or state.rank not in ranks:
        return state.rank in ranks
    if state.rank == ranks[0]:
        return is_pipeline_first_stage(ignore_virtual=False)
    if state.rank == ranks[-1]:
        return is_pipeline_last_stage(ignore_virtual=False)
    return True


def is_rank_in_position_embedding_group() -> bool:
    return _state("position embedding group").is_member("position_embedding")


def is_pipeline_stage_before_split(rank: int | None = None) -> bool:
    """Whether a stage (default: this rank's) belongs to the encoder. True in a model without a split."""
    if get_pipeline_model_parallel_world_size() == 1:
        return True
    stage = get_pipeline_model_parallel_rank() if rank is None else rank
    split = get_pipeline_model_parallel_split_rank()
    return split is None or stage < split


def is_pipeline_stage_after_split(rank: int | None = None) -> bool:
    """Whether a stage (default: this rank's) belongs to the decoder. True in a model without a split."""
    if get_pipeline_model_parallel_world_size() == 1:
        return True
    stage = get_pipeline_model_parallel_rank() if rank is None else rank
    split = get_pipeline_model_parallel_split_rank()
    return split is None or stage >= split


def is_pipeline_stage_at_split() -> bool:
    """Whether this stage is the encoder's last: the next one belongs to the decoder."""
    stage = get_pipeline_model_parallel_rank()
    return is_pipeline_stage_before_split(stage) and is_pipeline_stage_after_split(stage + 1)


def get_tensor_model_parallel_src_rank() -> int:
    """The first global rank of this rank's tensor group."""
    state, size = current_or_none(), on_the_fly().tensor_size
    if size is None:
        return _state("intra_layer_model parallel group").ranks("tp")[0]
    rank = dist.get_rank() if state is None else state.rank
    return rank // size * size


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    """The first global rank of this rank's data group."""
    return _state("Data parallel group").ranks(_data_kind(with_context_parallel))[0]


def get_pipeline_model_parallel_first_rank() -> int:
    return _pipeline()[0]


def get_pipeline_model_parallel_last_rank() -> int:
    return _pipeline()[get_pipeline_model_parallel_world_size() - 1]


def get_pipeline_model_parallel_next_rank() -> int:
    """The global rank of the next stage; after the last comes the first."""
    stage, stages = get_pipeline_model_parallel_rank(), get_pipeline_model_parallel_world_size()
    return _pipeline()[(stage + 1) % stages]


def get_pipeline_model_parallel_prev_rank() -> int:
    """The global rank of the previous stage; before the first comes the last."""
    stage, stages = get_pipeline_model_parallel_rank(), get_pipeline_model_parallel_world_size()
    return _pipeline()[(stage - 1) % stages]


def _pipeline() -> Ranks:
    ranks = _state("Pipeline parallel group").ranks("pp")
    if get_pipeline_model_parallel_world_size() > len(ranks):
        raise ParallelStateError(
            f"the pipeline size was set to {get_pipeline_model_parallel_world_size()} on the fly, but this "
            f"rank's pipeline group has {len(ranks)} ranks; take it back by "
            "set_pipeline_model_parallel_world_size(None)"
        )
    return ranks


def _data_kind(with_context_parallel: bool) -> Kind:
    return "dp_cp" if with_context_parallel else "dp"
