"""Megatron's groups, a row each, and the functions that all three Megatron modules share.

`tpkernels.parallel_state` and `interop.mpu` add functions of today's Megatron (`todays`), and
`interop.megatron_core.parallel_state` adds those of Megatron-Core 0.16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from tpkernels.groups.kinds import Ranks
from tpkernels.groups.plan import GroupKind
from tpkernels.groups.sizes import not_negative, positive
from tpkernels.groups.state import (
    ParallelState,
    ParallelStateError,
    current_or_none,
    on_the_fly,
    set_on_the_fly,
)

# None if check_initialized=False finds no group; Any, so that other callers need not check for None.
GroupOrNone = ProcessGroup | Any


def state_for(what: str) -> ParallelState:
    """Return the current state; raise that `what` is not initialized if there is none."""
    state = current_or_none()
    if state is None:
        raise ParallelStateError(f"{what} is not initialized: call initialize_model_parallel(...) first")
    return state


def change_number(name: str, number: int | None) -> None:
    """Change a size or a rank on the fly; None undoes the change.

    name: a field of `OnTheFly`
    """
    checked = number
    if number is not None:
        checked = positive(number, "world_size") if name.endswith("size") else not_negative(number, "rank")
    set_on_the_fly(replace(on_the_fly(), **{name: checked}))


@dataclass(frozen=True)
class NamedGroup:
    """This rank's group of a kind; its methods are Megatron's functions.

    error_name: its name in errors
    size_set, rank_set: fields of `OnTheFly` with numbers that callers have set; "": no number can be set
    """

    kind: GroupKind
    error_name: str
    size_set: str = ""
    rank_set: str = ""

    def group(self, check_initialized: bool = True) -> GroupOrNone:
        """Return this rank's process group; without it raise, or return None if not check_initialized."""
        state = current_or_none()
        if not check_initialized and (state is None or not state.is_member(self.kind)):
            return None
        return state_for(self.error_name).process_group(self.kind)

    def world_size(self) -> int:
        """Return the number of ranks in this rank's group, or the size that was set."""
        changed = self._changed(self.size_set)
        return state_for(self.error_name).size(self.kind) if changed is None else changed

    def rank(self) -> int:
        """Return this rank's position in its group, or the rank that was set."""
        changed = self._changed(self.rank_set)
        return state_for(self.error_name).rank_in(self.kind) if changed is None else changed

    def global_ranks(self, check_initialized: bool = True) -> list[int] | None:
        """Return the global ranks of this rank's group; without a state raise or return None, as `group`."""
        if not check_initialized and current_or_none() is None:
            return None
        return list(state_for(self.error_name).ranks(self.kind))

    def source_rank(self) -> int:
        """Return the first global rank of this rank's group."""
        return state_for(self.error_name).ranks(self.kind)[0]

    def set_world_size(self, world_size: int | None) -> None:
        """Make `world_size` return this number; None: the group's size."""
        change_number(self.size_set, world_size)

    def set_rank(self, rank: int | None) -> None:
        """Make `rank` return this number; None: the rank in the group."""
        change_number(self.rank_set, rank)

    def _changed(self, name: str) -> int | None:
        number: int | None = getattr(on_the_fly(), name) if name else None
        return number


MODEL = NamedGroup("model", "model parallel group")
TENSOR = NamedGroup("tp", "intra_layer_model parallel group", "tensor_size", "tensor_rank")
PIPELINE = NamedGroup("pp", "pipeline_model parallel group", "pipeline_size", "pipeline_rank")
DATA = NamedGroup("dp", "data parallel group", rank_set="data_rank")
DATA_AND_CONTEXT = NamedGroup("dp_cp", "data parallel group", rank_set="data_rank")
CONTEXT = NamedGroup("cp", "context parallel group")
TENSOR_AND_CONTEXT = NamedGroup("tp_cp", "tensor and context parallel group")
EMBEDDING = NamedGroup("embedding", "embedding group")
POSITION_EMBEDDING = NamedGroup("position_embedding", "position embedding group")
EXPERT = NamedGroup("ep", "expert model parallel group", "expert_size", "expert_rank")
EXPERT_DATA = NamedGroup("expert_dp", "expert data parallel group")
EXPERT_TENSOR = NamedGroup(
    "expert_tp", "expert tensor parallel group", "expert_tensor_size", "expert_tensor_rank"
)
EXPERT_TENSOR_AND_MODEL = NamedGroup("expert_tp_ep", "expert tensor and model parallel group")
ALL_STAGES = NamedGroup("expert_tp_ep_pp", "expert tensor-model-pipeline parallel group")
OPTIMIZER_INSTANCE = NamedGroup("world", "intra distributed optimizer instance group")
# The ranks among which a weight is gathered for each use: this rank alone.
REMAT = NamedGroup("alone", "generalized tensor parallel group")
EXPERT_REMAT = NamedGroup("alone", "expert generalized tensor parallel group")


def data_group(with_context_parallel: bool, partial_data_parallel: bool = False) -> NamedGroup:
    """Return the row of the data ranks, or of data and context ranks."""
    if partial_data_parallel and not with_context_parallel:
        raise ValueError(
            "partial_data_parallel=True: expected with_context_parallel=True, because an instance of the "
            "distributed optimizer counts context ranks, too"
        )
    return DATA_AND_CONTEXT if with_context_parallel else DATA


def all_ranks(
    data: Callable[[], int],
    context: Callable[[], int],
    expert: Callable[[], int],
    *,
    remat: Sequence[Callable[[], int]] = (),
) -> str:
    """Join this rank's tensor, weight-gathering, data, context, pipeline and expert ranks by "_".

    The tensor and pipeline getters are the table's; the caller passes its own for the others.
    remat: today's Megatron counts weight-gathering ranks, Megatron-Core 0.16 does not
    """
    return "_".join(str(rank()) for rank in (TENSOR.rank, *remat, data, context, PIPELINE.rank, expert))


def public_names(module: Mapping[str, Any]) -> list[str]:
    """Return names of functions that a module defines or takes from a `NamedGroup`, without its imports.

    module: its globals
    """
    return [
        name
        for name, value in module.items()
        if name[0] != "_"
        and (isinstance(value, MethodType) or getattr(value, "__module__", None) == module["__name__"])
    ]


def model_parallel_is_initialized() -> bool:
    """Whether model and data parallel groups exist."""
    return current_or_none() is not None


def is_initialized() -> bool:
    """Whether data parallel groups exist, that is, whether model parallel groups exist."""
    return model_parallel_is_initialized()


get_model_parallel_group = MODEL.group
"""The ranks that share one model: tensor x pipeline."""
get_model_parallel_src_rank = NamedGroup("model", "Model parallel group").source_rank

get_tensor_model_parallel_group = TENSOR.group
get_tensor_model_parallel_world_size = TENSOR.world_size
get_tensor_model_parallel_rank = TENSOR.rank
set_tensor_model_parallel_world_size = TENSOR.set_world_size
set_tensor_model_parallel_rank = TENSOR.set_rank


def get_tensor_model_parallel_src_rank() -> int:
    """The first global rank of this rank's tensor group, also for a size that was set."""
    state, size = current_or_none(), on_the_fly().tensor_size
    if size is None:
        return TENSOR.source_rank()
    rank = dist.get_rank() if state is None else state.rank
    return rank // size * size


get_pipeline_model_parallel_group = PIPELINE.group
get_pipeline_model_parallel_world_size = PIPELINE.world_size
get_pipeline_model_parallel_rank = PIPELINE.rank
set_pipeline_model_parallel_world_size = PIPELINE.set_world_size
set_pipeline_model_parallel_rank = PIPELINE.set_rank


def get_pipeline_model_parallel_first_rank() -> int:
    """The global rank of this pipeline's first stage."""
    return _pipeline()[0]


def get_pipeline_model_parallel_last_rank() -> int:
    """The global rank of this pipeline's last stage."""
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
    ranks = state_for("Pipeline parallel group").ranks("pp")
    if get_pipeline_model_parallel_world_size() > len(ranks):
        raise ParallelStateError(
            f"the pipeline size was set to {get_pipeline_model_parallel_world_size()} on the fly, but this "
            f"rank's pipeline group has {len(ranks)} ranks; undo it by "
            "set_pipeline_model_parallel_world_size(None)"
        )
    return ranks


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    """The current virtual stage; None without a virtual pipeline."""
    return on_the_fly().virtual_rank


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """The number of virtual stages; None without a virtual pipeline."""
    return on_the_fly().virtual_size


def set_virtual_pipeline_model_parallel_rank(rank: int | None) -> None:
    """Set the current virtual stage."""
    change_number("virtual_rank", rank)


def set_virtual_pipeline_model_parallel_world_size(world_size: int | None) -> None:
    """Set the number of virtual stages; None: no virtual pipeline."""
    change_number("virtual_size", world_size)


set_data_parallel_rank = DATA.set_rank


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    """The first global rank of this rank's data group."""
    kind: GroupKind = "dp_cp" if with_context_parallel else "dp"
    return NamedGroup(kind, "Data parallel group").source_rank()


get_context_parallel_group = CONTEXT.group
get_context_parallel_global_ranks = CONTEXT.global_ranks
get_tensor_and_context_parallel_group = TENSOR_AND_CONTEXT.group


def get_tensor_and_data_parallel_group(
    check_initialized: bool = True, with_context_parallel: bool = False
) -> GroupOrNone:
    """This rank's process group over the ranks of its tensor and data groups."""
    kind: GroupKind = "tp_dp_cp" if with_context_parallel else "tp_dp"
    return NamedGroup(kind, "tensor and data parallel group").group(check_initialized)


def get_amax_reduction_group(
    with_context_parallel: bool = False, tp_only_amax_red: bool = False
) -> ProcessGroup:
    """The ranks that share fp8 scales: tensor, data unless tp_only_amax_red, optionally context."""
    kinds: tuple[GroupKind, GroupKind] = ("tp", "tp_cp") if tp_only_amax_red else ("tp_dp", "tp_dp_cp")
    return NamedGroup(kinds[with_context_parallel], "FP8 amax reduction group").group()


get_embedding_group = EMBEDDING.group
"""The stages of this pipeline that share the word embedding; on other stages it raises, or returns None."""
get_position_embedding_group = POSITION_EMBEDDING.group
"""The stages of this pipeline that share the position embedding; on others it raises, or returns None."""

get_expert_model_parallel_group = EXPERT.group
get_expert_model_parallel_src_rank = EXPERT.source_rank
set_expert_model_parallel_world_size = EXPERT.set_world_size
set_expert_model_parallel_rank = EXPERT.set_rank

get_expert_tensor_parallel_group = EXPERT_TENSOR.group
"""The ranks over which one expert's weights are split."""
set_expert_tensor_parallel_world_size = EXPERT_TENSOR.set_world_size
set_expert_tensor_parallel_rank = EXPERT_TENSOR.set_rank

get_expert_tensor_and_model_parallel_group = EXPERT_TENSOR_AND_MODEL.group


def get_expert_tensor_model_pipeline_parallel_group(
    check_initialized: bool = True, with_egtp_remat: bool = False
) -> GroupOrNone:
    """This rank's process group over all stages of its experts' tensor and expert ranks.

    with_egtp_remat: no effect: no weights are gathered for each use
    """
    return ALL_STAGES.group(check_initialized)


get_gtp_weight_remat_group = REMAT.group
get_gtp_weight_remat_world_size = REMAT.world_size
get_gtp_weight_remat_rank = REMAT.rank
get_gtp_weight_remat_global_ranks = REMAT.global_ranks
get_expert_gtp_weight_remat_group = EXPERT_REMAT.group
get_expert_gtp_weight_remat_world_size = EXPERT_REMAT.world_size
get_expert_gtp_weight_remat_rank = EXPERT_REMAT.rank
get_expert_gtp_weight_remat_global_ranks = EXPERT_REMAT.global_ranks


if not TYPE_CHECKING:  # type checkers read the names themselves
    MEGATRONS = ("get_", "set_", "is_", "model_parallel_is_")
    __all__ = [name for name in public_names(globals()) if name.startswith(MEGATRONS)]
