"""The groups that Megatron names, a row each, and the functions that are made of a row.

Three faces have them: `tpkernels.parallel_state`, `interop.mpu` and `interop.megatron_core.parallel_state`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

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

# None if check_initialized=False finds no group: Any, so that callers need not check for None otherwise.
GroupOrNone = ProcessGroup | Any


def state_for(what: str) -> ParallelState:
    """The current state; without one an error that `what` is not initialized."""
    state = current_or_none()
    if state is None:
        raise ParallelStateError(f"{what} is not initialized: call initialize_model_parallel(...) first")
    return state


def set_number(name: str, number: int | None) -> None:
    """Change a size or a rank on the fly; None takes the change back.

    name: a field of `OnTheFly`
    """
    checked = number
    if number is not None:
        checked = positive(number, "world_size") if name.endswith("size") else not_negative(number, "rank")
    set_on_the_fly(replace(on_the_fly(), **{name: checked}))


@dataclass(frozen=True)
class NamedGroup:
    """This rank's group of a kind: its methods are Megatron's functions.

    said: what errors call it
    size_set, rank_set: fields of `OnTheFly` that have what callers have set; "": nothing can be set
    """

    kind: Kind
    said: str
    size_set: str = ""
    rank_set: str = ""

    def group(self, check_initialized: bool = True) -> GroupOrNone:
        """This rank's process group; without one an error, or None if check_initialized is False."""
        state = current_or_none()
        if not check_initialized and (state is None or not state.is_member(self.kind)):
            return None
        return state_for(self.said).process_group(self.kind)

    def world_size(self) -> int:
        """The number of ranks in this rank's group, or the one that was set."""
        changed = self._changed(self.size_set)
        return state_for(self.said).size(self.kind) if changed is None else changed

    def rank(self) -> int:
        """This rank's position in its group, or the one that was set."""
        changed = self._changed(self.rank_set)
        return state_for(self.said).rank_in(self.kind) if changed is None else changed

    def global_ranks(self, check_initialized: bool = True) -> list[int] | None:
        """The global ranks of this rank's group; without a state an error, or None, as of `group`."""
        if not check_initialized and current_or_none() is None:
            return None
        return list(state_for(self.said).ranks(self.kind))

    def source_rank(self) -> int:
        """The first global rank of this rank's group."""
        return state_for(self.said).ranks(self.kind)[0]

    def set_world_size(self, world_size: int | None) -> None:
        """Let `world_size` answer this number; None: the group's."""
        set_number(self.size_set, world_size)

    def set_rank(self, rank: int | None) -> None:
        """Let `rank` answer this number; None: the one in the group."""
        set_number(self.rank_set, rank)

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
# The ranks that a weight is gathered from for each use: this rank alone.
REMAT = NamedGroup("alone", "generalized tensor parallel group")
EXPERT_REMAT = NamedGroup("alone", "expert generalized tensor parallel group")


def data_group(with_context_parallel: bool, partial_data_parallel: bool = False) -> NamedGroup:
    """The row of the data ranks, or of data and context ranks."""
    if partial_data_parallel and not with_context_parallel:
        raise ValueError(
            "partial_data_parallel=True: expected with_context_parallel=True, for an instance of the "
            "distributed optimizer counts context ranks too"
        )
    return DATA_AND_CONTEXT if with_context_parallel else DATA


def all_ranks(
    data: Callable[[], int],
    context: Callable[[], int],
    expert: Callable[[], int],
    *,
    remat: Sequence[Callable[[], int]] = (),
) -> str:
    """This rank's tensor, weight-gathering, data, context, pipeline and expert ranks, joined by "_".

    The tensor and pipeline getters are those of the table; the others are the face's own.
    remat: today's Megatron counts weight-gathering ranks, Megatron-Core 0.16 does not
    """
    return "_".join(str(rank()) for rank in (TENSOR.rank, *remat, data, context, PIPELINE.rank, expert))


def public_names(module: Mapping[str, Any]) -> list[str]:
    """Names of the functions that a module defines or takes of a `NamedGroup`, without what it imports.

    module: its globals
    """
    return [
        name
        for name, value in module.items()
        if name[0] != "_"
        and (isinstance(value, MethodType) or getattr(value, "__module__", None) == module["__name__"])
    ]
