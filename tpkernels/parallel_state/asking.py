"""What the functions of Megatron's `parallel_state` have in common: a state to ask, or an error."""

from __future__ import annotations

from typing import Any

from torch.distributed import ProcessGroup

from tpkernels.runtime.state import ParallelState, ParallelStateError, current_or_none
from tpkernels.topology.plan import Kind

# None where check_initialized=False finds no group; callers that leave it True need not look.
GroupOrNone = ProcessGroup | Any


def state_for(what: str) -> ParallelState:
    state = current_or_none()
    if state is None:
        raise ParallelStateError(f"{what} is not initialized: call initialize_model_parallel(...) first")
    return state


def group_for(what: str, kind: Kind, check_initialized: bool = True) -> GroupOrNone:
    """This rank's group; without one an error, or None if that is not to be checked."""
    state = current_or_none()
    if not check_initialized and (state is None or not state.is_member(kind)):
        return None
    return state_for(what).process_group(kind)


def size_for(what: str, kind: Kind, on_the_fly: int | None = None) -> int:
    return state_for(what).size(kind) if on_the_fly is None else on_the_fly


def rank_for(what: str, kind: Kind, on_the_fly: int | None = None) -> int:
    return state_for(what).rank_in(kind) if on_the_fly is None else on_the_fly


def data_kind(with_context_parallel: bool, partial_data_parallel: bool = False) -> Kind:
    """With one instance of the distributed optimizer its part of the data ranks is all of them."""
    if partial_data_parallel and not with_context_parallel:
        raise ValueError(
            "partial_data_parallel=True: expected with_context_parallel=True, for an instance of the "
            "distributed optimizer counts context ranks too"
        )
    return "dp_cp" if with_context_parallel else "dp"
