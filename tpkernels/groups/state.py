"""The parallel state of this process: its rank, its plan and its process groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar

from torch.distributed import ProcessGroup

from tpkernels.groups.kinds import Ranks
from tpkernels.groups.plan import COMBINED_KINDS, GroupKind, GroupPlan


class ParallelStateError(RuntimeError, AssertionError):
    """Model parallelism is not set up, or not as the caller expects.

    Also an `AssertionError`, which Megatron raises and existing code catches.
    """


@dataclass(frozen=True, eq=False, slots=True)
class ParallelState:
    """This process's rank in a plan, and the process groups that it belongs to."""

    rank: int
    plan: GroupPlan
    process_groups: Mapping[GroupKind, ProcessGroup]  # equal groups share one object
    further: Mapping[str, ProcessGroup] = field(default_factory=dict)  # of no kind in the plan, by name

    def ranks(self, kind: GroupKind) -> Ranks:
        """Return the global ranks of this process's `kind` group."""
        return self.plan.group_of(self.rank, kind)

    def size(self, kind: GroupKind) -> int:
        """Return the number of ranks in this process's `kind` group."""
        return len(self.ranks(kind))

    def rank_in(self, kind: GroupKind) -> int:
        """Return this process's rank within its `kind` group."""
        return self.plan.index_in(self.rank, kind)

    def is_member(self, kind: GroupKind) -> bool:
        """Whether this process belongs to a `kind` group, such as "embedding"."""
        return self.plan.is_member(self.rank, kind)

    def process_group(self, kind: GroupKind) -> ProcessGroup:
        """Return this process's `kind` group; raise `ParallelStateError` if it belongs to none."""
        if not self.is_member(kind):
            raise ParallelStateError(
                f"{kind.replace('_', ' ')} group is not initialized on rank {self.rank}: it is pipeline "
                f"stage {self.plan.stage_of(self.rank)} of {self.plan.pipeline}, which is not in that group"
            )
        if kind in COMBINED_KINDS and kind not in self.process_groups:
            raise ParallelStateError(
                f"this state has no {kind.replace('_', ' ')} group: such groups are made by "
                "tpkernels.parallel_state.initialize_model_parallel(...), not by "
                "tpkernels.initialize_model_parallel(...) or create_parallel_state(...)"
            )
        return self.process_groups[kind]


class _StateOfProcess:
    """The current state; not a ContextVar: threads of autograd and recomputation inherit no context."""

    state: ParallelState | None = None
    overwritten: ClassVar[dict[str, int]] = {}  # sizes and ranks, by name; not part of the frozen state
    at_destroy: ClassVar[list[Callable[[], None]]] = []


def current_or_none() -> ParallelState | None:
    return _StateOfProcess.state


def current() -> ParallelState:
    """Return the current parallel state; raise `ParallelStateError` if there is none."""
    if _StateOfProcess.state is None:
        raise ParallelStateError(
            "model parallel state is not initialized: call tpkernels.initialize_model_parallel(...) "
            "after torch.distributed.init_process_group(...)"
        )
    return _StateOfProcess.state


def overwritten() -> dict[str, int]:
    """Return the sizes and ranks that `tpkernels.parallel_state` overwrites by name, until the state goes."""
    return _StateOfProcess.overwritten


def install(state: ParallelState) -> None:
    """Make `state` current. A virtual pipeline starts at its first stage."""
    _StateOfProcess.state = state
    if state.plan.virtual_pipeline is not None:
        overwritten().update(virtual_size=state.plan.virtual_pipeline, virtual_rank=0)


def uninstall() -> None:
    """Remove the current state, and all numbers that were overwritten."""
    _StateOfProcess.state = None
    _StateOfProcess.overwritten = {}


def at_destroy(function: Callable[[], None]) -> None:
    """Call `function` once, when `destroy_model_parallel` is called."""
    _StateOfProcess.at_destroy.append(function)


def call_at_destroy() -> None:
    """Call the functions that `at_destroy` was given, the last first."""
    while _StateOfProcess.at_destroy:
        _StateOfProcess.at_destroy.pop()()


@contextmanager
def use(state: ParallelState) -> Iterator[ParallelState]:
    """Make `state` current inside the block, for tests or for two models in one process."""
    if not isinstance(state, ParallelState):
        raise TypeError(f"state: expected a ParallelState, got {state!r}")
    outside = _StateOfProcess.state, _StateOfProcess.overwritten
    uninstall()
    install(state)
    try:
        yield state
    finally:
        _StateOfProcess.state, _StateOfProcess.overwritten = outside
