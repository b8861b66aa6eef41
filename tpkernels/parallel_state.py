"""Megatron's `parallel_state`, with its names, arguments and results, over the state in `tpkernels.groups`.

It has the functions of early sources and of the newest Megatron-Core. `interop.mpu` adds the older source's
spellings, `interop.megatron_core.parallel_state` what Megatron's own code asks for.

Before `initialize_model_parallel` getters raise `ParallelStateError`, which is both a `RuntimeError` and an
`AssertionError`, as callers may catch either. The `set_...` functions overwrite sizes and ranks, with or
without an initialized state; None undoes a change (of the virtual pipeline: it sets None).

with_gtp_remat, with_egtp_remat: no effect: no weights are gathered for each use
partial_data_parallel: no effect: there is one instance of the distributed optimizer
ignore_virtual: the virtual stage does not count; the default is True in today's Megatron, and in
    `interop.megatron_core`
vp_stage: a virtual stage; by default the current one, initially 0
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from inspect import signature
from itertools import dropwhile
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from tpkernels.groups.c10d import takes_cpu_tensors_by_gloo
from tpkernels.groups.initialize import GroupSettings, agree_and_create, as_text, canonical
from tpkernels.groups.initialize import destroy_model_parallel as destroy_model_parallel
from tpkernels.groups.kinds import COMBINED_KINDS, KINDS, GroupKind, Ranks
from tpkernels.groups.plan import GroupPlan, plan_groups
from tpkernels.groups.sizes import DEFAULT_ORDER, InvalidSizes, not_negative, positive
from tpkernels.groups.state import ParallelState, ParallelStateError, current_or_none, overwritten

# None if check_initialized=False finds no group; Any, so that other callers need not check for None.
GroupOrNone = ProcessGroup | Any


def state_for(what: str) -> ParallelState:
    """Return the current state; raise that `what` is not initialized if there is none."""
    state = current_or_none()
    if state is None:
        raise ParallelStateError(f"{what} is not initialized: call initialize_model_parallel(...) first")
    return state


def _overwrite(name: str, number: int | None) -> None:
    """Overwrite a size or a rank; None undoes it."""
    if number is None:
        overwritten().pop(name, None)
    elif name.endswith("size"):
        overwritten()[name] = positive(number, "world_size")
    else:
        overwritten()[name] = not_negative(number, "rank")


@dataclass(frozen=True)
class NamedGroup:
    """This rank's group of a kind; its methods are Megatron's functions.

    error_name: its name in errors
    size_set, rank_set: names of numbers that callers may overwrite; "": no number can be set
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
        size = overwritten().get(self.size_set)
        return state_for(self.error_name).size(self.kind) if size is None else size

    def rank(self) -> int:
        """Return this rank's position in its group, or the rank that was set."""
        rank = overwritten().get(self.rank_set)
        return state_for(self.error_name).rank_in(self.kind) if rank is None else rank

    def global_ranks(self, check_initialized: bool = True) -> list[int] | None:
        """Return the global ranks of this rank's group; without a state raise or return None, as `group`."""
        if not check_initialized and current_or_none() is None:
            return None
        return list(state_for(self.error_name).ranks(self.kind))

    def source_rank(self) -> int:
        """Return the first global rank of this rank's group."""
        return state_for(self.error_name).ranks(self.kind)[0]

    def gloo_group(self) -> ProcessGroup:
        """Return this rank's process group; raise unless gloo moves its CPU tensors."""
        group = NamedGroup(self.kind, f"{self.error_name}-gloo").group()
        if not takes_cpu_tensors_by_gloo(group):
            raise ParallelStateError(
                f"the {self.kind} group does not move CPU tensors by gloo, and has no twin that does: make "
                'groups of both, by init_process_group("cpu:gloo,cuda:nccl") or '
                'initialize_model_parallel(..., backend="cpu:gloo,cuda:nccl")'
            )
        return group

    def set_world_size(self, world_size: int | None) -> None:
        """Make `world_size` return this number; None: the group's size."""
        _overwrite(self.size_set, world_size)

    def set_rank(self, rank: int | None) -> None:
        """Make `rank` return this number; None: the rank in the group."""
        _overwrite(self.rank_set, rank)


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


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    pipeline_model_parallel_split_rank: int | None = None,
    *,
    context_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
    order: str = DEFAULT_ORDER,
    timeout: timedelta | None = None,
    backend: str | None = None,
    group_options: Mapping[GroupKind, Any] | None = None,
    distributed_timeout_minutes: float | None = None,
    create_gloo_process_groups: bool = True,
    expert_tensor_parallel_size: int | None = None,
    pipeline_model_parallel_comm_backend: str | None = None,
    use_sharp: bool = False,
    sharp_enabled_group: str | None = None,
    hierarchical_context_parallel_sizes: Sequence[int] | None = None,
    hybrid_context_parallel: bool = False,
    gtp_remat_size: int = 1,
    expert_gtp_remat_size: int = 1,
    num_distributed_optimizer_instances: int = 1,
    nccl_communicator_config_path: str | None = None,
    high_priority_stream_groups: Sequence[str] | None = None,
    get_embedding_ranks: Callable[..., Any] | None = None,
    get_position_embedding_ranks: Callable[..., Any] | None = None,
    rank_offset: int = 0,
    local_world_size: int | None = None,
) -> ParallelState:
    """As `tpkernels.initialize_model_parallel`, but also make combined groups, such as tensor x data.

    Takes the arguments of today's Megatron, too.

    distributed_timeout_minutes: `timeout` in minutes; by default the default process group's, too
    create_gloo_process_groups: no effect, see `get_data_parallel_group_gloo`
    expert_tensor_parallel_size: None or the tensor-parallel size

    Other arguments support Megatron's defaults only; `docs/megatron.md` has alternatives.
    """
    given = dict(locals())
    # "parallel_state.": it makes other groups than tpkernels.initialize_model_parallel
    request = f"parallel_state.{as_text(initialize_model_parallel, given)}"
    limit = timeout if distributed_timeout_minutes is None else _from_minutes(distributed_timeout_minutes)

    def plan(world_size: int) -> GroupPlan:
        for name, default in _ONLY.items():
            if given[name] != default and (given[name] or default):
                raise InvalidSizes(
                    f"{name}: expected {default!r}, got {canonical(given[name])!r}: it is not supported; "
                    "docs/megatron.md says what to use instead"
                )
        if expert_tensor_parallel_size not in (None, tensor_model_parallel_size):
            raise InvalidSizes(
                f"expert_tensor_parallel_size: expected {tensor_model_parallel_size}, the "
                f"tensor_model_parallel_size, whose groups experts use, got {expert_tensor_parallel_size!r}"
            )
        if distributed_timeout_minutes is not None and (timeout is not None or limit is None):
            raise InvalidSizes(
                "distributed_timeout_minutes: expected a positive number, and no timeout= with it, got "
                f"{distributed_timeout_minutes!r} and timeout={timeout!r}"
            )
        return plan_groups(
            world_size=world_size,
            tensor=tensor_model_parallel_size,
            pipeline=pipeline_model_parallel_size,
            context=context_parallel_size,
            expert=expert_model_parallel_size,
            virtual_pipeline=virtual_pipeline_model_parallel_size,
            split_rank=pipeline_model_parallel_split_rank,
            order=order,
        )

    return agree_and_create(
        request, plan, GroupSettings(limit, backend, group_options, (*KINDS, *COMBINED_KINDS))
    )


_PARAMETERS = signature(initialize_model_parallel).parameters
# From this argument on each must have its default, which is Megatron's, or another empty value.
_ONLY: Mapping[str, object] = {
    name: _PARAMETERS[name].default
    for name in dropwhile(lambda name: name != "pipeline_model_parallel_comm_backend", _PARAMETERS)
}


def _from_minutes(minutes: float) -> timedelta | None:
    is_number = isinstance(minutes, int | float) and not isinstance(minutes, bool)
    return timedelta(minutes=minutes) if is_number and 0 < minutes < 1e6 else None


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
    state, size = current_or_none(), overwritten().get("tensor_size")
    if size is None:
        return TENSOR.source_rank()
    rank = dist.get_rank() if state is None else state.rank
    return rank // size * size


get_gtp_weight_remat_group = REMAT.group
get_gtp_weight_remat_world_size = REMAT.world_size
get_gtp_weight_remat_rank = REMAT.rank
get_gtp_weight_remat_global_ranks = REMAT.global_ranks


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
    """This rank's position in `get_data_parallel_group`, or the rank that was set."""
    return data_group(with_context_parallel, partial_data_parallel).rank()


set_data_parallel_rank = DATA.set_rank


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    """The first global rank of this rank's data group."""
    return NamedGroup(data_group(with_context_parallel).kind, "Data parallel group").source_rank()


def get_data_parallel_group_gloo(
    with_context_parallel: bool = False, partial_data_parallel: bool = False
) -> ProcessGroup:
    """The data group; raises unless gloo moves its CPU tensors."""
    return data_group(with_context_parallel, partial_data_parallel).gloo_group()


get_context_parallel_group = CONTEXT.group
get_context_parallel_world_size = CONTEXT.world_size
get_context_parallel_rank = CONTEXT.rank
get_context_parallel_global_ranks = CONTEXT.global_ranks
get_tensor_and_context_parallel_group = TENSOR_AND_CONTEXT.group
get_tensor_and_context_parallel_world_size = TENSOR_AND_CONTEXT.world_size
get_tensor_and_context_parallel_rank = TENSOR_AND_CONTEXT.rank


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


def get_hybrid_data_context_parallel_groups(
    check_initialized: bool = True, group_size: int | None = None
) -> ProcessGroup:
    """The data and context group; raises unless it has group_size ranks: there are no smaller groups."""
    size = DATA_AND_CONTEXT.world_size()
    if group_size != size:
        raise ParallelStateError(
            f"hybrid data and context parallel groups of {group_size} ranks do not exist, only the group of "
            f"all {size} data and context ranks"
        )
    return DATA_AND_CONTEXT.group()


def get_hierarchical_context_parallel_groups(check_initialized: bool = True) -> None:
    """Return None; raise if check_initialized, as in Megatron without these groups."""
    _not_here("hierarchical context parallel groups", check_initialized)


get_expert_model_parallel_group = EXPERT.group
get_expert_model_parallel_world_size = EXPERT.world_size
get_expert_model_parallel_rank = EXPERT.rank
get_expert_model_parallel_src_rank = EXPERT.source_rank
set_expert_model_parallel_world_size = EXPERT.set_world_size
set_expert_model_parallel_rank = EXPERT.set_rank

get_expert_tensor_parallel_group = EXPERT_TENSOR.group
"""The ranks over which one expert's weights are split."""
get_expert_tensor_parallel_world_size = EXPERT_TENSOR.world_size
get_expert_tensor_parallel_rank = EXPERT_TENSOR.rank
set_expert_tensor_parallel_world_size = EXPERT_TENSOR.set_world_size
set_expert_tensor_parallel_rank = EXPERT_TENSOR.set_rank

get_expert_tensor_and_model_parallel_group = EXPERT_TENSOR_AND_MODEL.group
get_expert_tensor_and_model_parallel_world_size = EXPERT_TENSOR_AND_MODEL.world_size
get_expert_tensor_and_model_parallel_rank = EXPERT_TENSOR_AND_MODEL.rank

get_expert_gtp_weight_remat_group = EXPERT_REMAT.group
get_expert_gtp_weight_remat_world_size = EXPERT_REMAT.world_size
get_expert_gtp_weight_remat_rank = EXPERT_REMAT.rank
get_expert_gtp_weight_remat_global_ranks = EXPERT_REMAT.global_ranks


def get_expert_tensor_model_pipeline_parallel_group(
    check_initialized: bool = True, with_egtp_remat: bool = False
) -> GroupOrNone:
    """This rank's process group over all stages of its experts' tensor and expert ranks."""
    return ALL_STAGES.group(check_initialized)


def get_expert_data_parallel_group(
    check_initialized: bool = True, with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
) -> GroupOrNone:
    """The ranks that hold the same shards of the same experts."""
    return EXPERT_DATA.group(check_initialized)


def get_expert_data_parallel_world_size(
    with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
) -> int:
    """The number of ranks in `get_expert_data_parallel_group`."""
    return EXPERT_DATA.world_size()


def get_expert_data_parallel_rank(
    with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
) -> int:
    """This rank's position in `get_expert_data_parallel_group`."""
    return EXPERT_DATA.rank()


def get_expert_data_parallel_group_gloo(partial_expert_data_parallel: bool = False) -> ProcessGroup:
    """The expert data group; raises unless gloo moves its CPU tensors."""
    return EXPERT_DATA.gloo_group()


get_intra_distributed_optimizer_instance_group = OPTIMIZER_INSTANCE.group
"""All ranks, because there is one instance."""


def get_inter_distributed_optimizer_instance_group(check_initialized: bool = True) -> None:
    """Return None, because there is one instance; raise if check_initialized, as in Megatron."""
    _not_here("inter distributed optimizer instance group", check_initialized)


def _not_here(what: str, check_initialized: bool) -> None:
    if check_initialized:
        state_for(what)
        raise ParallelStateError(
            f"{what} is not initialized: it is not supported; check_initialized=False returns None"
        )


def get_all_ranks() -> str:
    """This rank's tensor, weight-gathering, data, context, pipeline and expert ranks, joined by "_"."""
    return "_".join(str(row.rank()) for row in (TENSOR, REMAT, DATA, CONTEXT, PIPELINE, EXPERT))


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
    return _pipeline()[PIPELINE.world_size() - 1]


def get_pipeline_model_parallel_next_rank() -> int:
    """The global rank of the next stage; after the last comes the first."""
    return _pipeline()[(PIPELINE.rank() + 1) % PIPELINE.world_size()]


def get_pipeline_model_parallel_prev_rank() -> int:
    """The global rank of the previous stage; before the first comes the last."""
    return _pipeline()[(PIPELINE.rank() - 1) % PIPELINE.world_size()]


def _pipeline() -> Ranks:
    ranks = state_for("Pipeline parallel group").ranks("pp")
    if PIPELINE.world_size() > len(ranks):
        raise ParallelStateError(
            f"the pipeline size was set to {PIPELINE.world_size()} on the fly, but this rank's pipeline "
            f"group has {len(ranks)} ranks; undo it by set_pipeline_model_parallel_world_size(None)"
        )
    return ranks


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """The number of virtual stages; None without a virtual pipeline."""
    return overwritten().get("virtual_size")


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    """The current virtual stage; None without a virtual pipeline."""
    return overwritten().get("virtual_rank")


def set_virtual_pipeline_model_parallel_world_size(world_size: int | None) -> None:
    """Set the number of virtual stages; None: no virtual pipeline."""
    _overwrite("virtual_size", world_size)


def set_virtual_pipeline_model_parallel_rank(rank: int | None) -> None:
    """Set the current virtual stage."""
    _overwrite("virtual_rank", rank)


def get_pipeline_model_parallel_split_rank() -> int | None:
    """The first stage of the decoder, or None in a model without one."""
    state, split = current_or_none(), overwritten().get("split_rank")
    return split if split is not None or state is None else state.plan.split_rank


def set_pipeline_model_parallel_split_rank(rank: int | None) -> None:
    """Set the decoder's first stage."""
    _overwrite("split_rank", rank)


def is_pipeline_first_stage(ignore_virtual: bool = False, vp_stage: int | None = None) -> bool:
    """Whether this is the first stage, in a virtual pipeline also the first virtual stage."""
    first = PIPELINE.rank() == 0
    return _at(first, lambda stage, stages: stage == 0, ignore_virtual, vp_stage)


def is_pipeline_last_stage(ignore_virtual: bool = False, vp_stage: int | None = None) -> bool:
    """Whether this is the last stage, in a virtual pipeline also the last virtual stage."""
    last = PIPELINE.rank() == PIPELINE.world_size() - 1
    return _at(last, lambda stage, stages: stage == stages - 1, ignore_virtual, vp_stage)


get_embedding_group = EMBEDDING.group
"""The stages of this pipeline that share the word embedding; on other stages it raises, or returns None."""
get_position_embedding_group = POSITION_EMBEDDING.group
"""The stages of this pipeline that share the position embedding; on others it raises, or returns None."""


def is_rank_in_embedding_group(ignore_virtual: bool = False, vp_stage: int | None = None) -> bool:
    """Whether this rank holds the word embedding, in a virtual pipeline in this virtual stage."""
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
    """Combine the answer for the pipeline stage with that for the virtual stage, `at(stage, stages)`."""
    stages = get_virtual_pipeline_model_parallel_world_size()
    if vp_stage is not None and stages is not None and not 0 <= vp_stage < stages:
        raise ValueError(f"vp_stage: expected a virtual stage from 0 to {stages - 1}, got {vp_stage}")
    if not at_stage or ignore_virtual or stages is None:
        return at_stage
    return at(get_virtual_pipeline_model_parallel_rank() if vp_stage is None else vp_stage, stages)


def is_pipeline_stage_before_split(rank: int | None = None) -> bool:
    """Whether a stage, by default this rank's, belongs to the encoder; True in a model without a split."""
    split = _split_if_parallel()
    return split is None or (PIPELINE.rank() if rank is None else rank) < split


def is_pipeline_stage_after_split(rank: int | None = None) -> bool:
    """Whether a stage, by default this rank's, belongs to the decoder; True in a model without a split."""
    split = _split_if_parallel()
    return split is None or (PIPELINE.rank() if rank is None else rank) >= split


def _split_if_parallel() -> int | None:
    return None if PIPELINE.world_size() == 1 else get_pipeline_model_parallel_split_rank()


def is_pipeline_stage_at_split() -> bool:
    """Whether this is the encoder's last stage and the next stage belongs to the decoder."""
    stage = PIPELINE.rank()
    return is_pipeline_stage_before_split(stage) and is_pipeline_stage_after_split(stage + 1)


if not TYPE_CHECKING:  # type checkers read the names themselves
    _PREFIXES = ("get_", "set_", "is_", "model_parallel_is_", "initialize_model_", "destroy_model_")
    __all__ = [name for name in dir() if name.startswith(_PREFIXES)]
