"""The tensor-parallel rank, size and group of a layer, looked up once, when it is built."""

from __future__ import annotations

import os
from typing import Any, Protocol
from weakref import ref

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from tpkernels.groups import c10d
from tpkernels.groups.sizes import not_negative, positive
from tpkernels.groups.state import ParallelState, ParallelStateError, current, current_or_none, overwritten
from tpkernels.layers.wrappers import refuse_ddp
from tpkernels.tp_invariance import given_or_default, own_segments


class TensorGroupHolder(Protocol):
    """An object with a tensor-parallel group `tp`, such as Megatron's ProcessGroupCollection."""

    @property
    def tp(self) -> object: ...


class RankAndSize(Protocol):
    """A rank and a size without a group: enough to compute on one rank, or to hold shards of several."""

    def rank(self) -> int: ...

    def size(self) -> int: ...


# None: the current parallel state. A mesh needs one dimension, or one that is called "tp".
State = ParallelState | ProcessGroup | DeviceMesh | TensorGroupHolder | RankAndSize | None

TENSOR_DIM = "tp"


class TensorWorld:
    """Rank and size within a tensor-parallel group, and the group itself.

    The group is referenced weakly: a destroyed group that is still referenced keeps its threads, which may
    outlive the interpreter. Copies of a layer share its group; an unpickled layer takes the group of the
    current state.
    """

    tp_invariant: int = 0  # segments of TP-invariance, over all ranks

    def __init__(self, rank: int, size: int, group: ProcessGroup | None, why: str = "set on the fly") -> None:
        """why: how rank and size came about, for the error if there is no group"""
        self._why = why
        self.rank = rank
        self.size = size
        self._group = None if group is None else ref(group)
        self._process = os.getpid()

    @property
    def group(self) -> ProcessGroup:
        """The process group; raises if there is none that may be used now."""
        group = None if self._group is None else self._group()
        if torch.compiler.is_compiling() and group is not None:
            return group  # what follows would run once, while tracing
        if DistributedDataParallel._active_ddp_module is not None:
            refuse_ddp(DistributedDataParallel._active_ddp_module)
        if group is None or not c10d.is_alive(group) or self._process != os.getpid():
            return self._found_or_refused(group)
        return group

    def _found_or_refused(self, group: ProcessGroup | None) -> ProcessGroup:
        """Return the group of a rank alone, or raise."""
        if self._group is None and self.size == 1 and dist.is_initialized():
            self._group = ref(group := c10d.group_of_this_rank())
            return group
        if self._group is None and self.size == 1:
            raise ParallelStateError(
                f"tensor rank 0 of 1 was {self._why}, and torch.distributed is not initialized: call "
                "torch.distributed.init_process_group before the first forward, also for one rank"
            )
        if self._group is None:
            raise ParallelStateError(
                f"tensor rank {self.rank} of {self.size} was {self._why}: a layer may hold its weights, "
                "but there is no process group to compute with; build it after "
                "initialize_model_parallel(...) with that size"
            )
        if group is None or not c10d.is_alive(group):
            raise ParallelStateError(
                "the tensor-parallel group was destroyed; build layers again after "
                "initialize_model_parallel(...)"
            )
        raise ParallelStateError(
            f"the tensor-parallel group belongs to process {self._process}: a forked child cannot use "
            "it; start processes by spawn, and build layers in each"
        )

    @property
    def segments(self) -> int:
        """Segments of TP-invariance of each rank, or 0 without it; raises if ranks do not divide them."""
        return own_segments("tensor-parallel layers", self.tp_invariant, self.size)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks of the group; empty without a group, or if it was destroyed."""
        group = None if self._group is None else self._group()
        alive = group is not None and c10d.is_alive(group)
        return tuple(dist.get_process_group_ranks(group)) if alive else ()

    def __repr__(self) -> str:
        return f"rank {self.rank} of {self.size}"

    def __copy__(self) -> TensorWorld:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorWorld:
        return self

    def __reduce__(self) -> tuple[Any, tuple[int, int, int]]:
        return _found_again, (self.rank, self.size, self.tp_invariant)


def tensor_world(state: State = None, tp_invariant: int | None = None) -> TensorWorld:
    """Return the tensor-parallel world of `state`.

    state: a parallel state, a process group, a device mesh, or an object with a group `tp`, as Megatron's
        ProcessGroupCollection; an object with only rank() and size() computes on one rank; None: the current
        parallel state, with rank and size that were set on the fly
    tp_invariant: segments of TP-invariance; None: as `tpkernels.tp_invariant` says now
    """
    world = _world_of(state)
    world.tp_invariant = given_or_default(tp_invariant)
    return world


def _world_of(state: State) -> TensorWorld:
    given: object = state  # callers need not be type-checked
    if given is None:
        return _ambient()
    if isinstance(given, ParallelState):
        return TensorWorld(given.rank_in("tp"), given.size("tp"), given.process_group("tp"))
    if isinstance(given, DeviceMesh):
        return _of_group(_group_of_mesh(given))
    if isinstance(given, ProcessGroup):
        return _of_group(given)
    if (group := getattr(given, "tp", None)) is not None:
        return _world_of(group)
    if callable(getattr(given, "rank", None)) and callable(getattr(given, "size", None)):
        return _of_rank_and_size(given)
    got = "the group of other ranks" if given is dist.GroupMember.NON_GROUP_MEMBER else repr(given)
    raise TypeError(
        "state: expected a ParallelState, a process group that this rank is in, a DeviceMesh, an object with "
        f"such a group `tp`, or None for the current parallel state, got {got}"
    )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def group_of(state: State = None) -> ProcessGroup:
    """The tensor-parallel group of `state`; under torch.compile the group at the time of tracing."""
    return tensor_world(state).group


def _ambient() -> TensorWorld:
    size, rank = overwritten().get("tensor_size"), overwritten().get("tensor_rank")
    state = current_or_none()
    if size is None and rank is None:
        return _world_of(current())
    if size is None:
        size = current().size("tp")
    if rank is None:
        rank = 0 if state is None else state.rank_in("tp")
    if not 0 <= rank < size:
        raise ParallelStateError(
            f"tensor rank {rank} of {size}, as set on the fly, does not exist; set both, with "
            "set_tensor_model_parallel_world_size and set_tensor_model_parallel_rank"
        )
    fits = state is not None and (rank, size) == (state.rank_in("tp"), state.size("tp"))
    return TensorWorld(rank, size, state.process_group("tp") if state is not None and fits else None)


def _of_group(group: ProcessGroup) -> TensorWorld:
    if not c10d.is_alive(group):
        raise ParallelStateError("state: expected a process group that is alive, got one that was destroyed")
    return TensorWorld(group.rank(), group.size(), group)


def _of_rank_and_size(given: Any) -> TensorWorld:
    rank, size = not_negative(given.rank(), "rank()"), positive(given.size(), "size()")
    if rank >= size:
        raise ValueError(f"state: expected a rank() below size() {size}, got {rank} of {given!r}")
    return TensorWorld(rank, size, None, f"given by {type(given).__name__}, which is no process group")


def _group_of_mesh(mesh: DeviceMesh) -> ProcessGroup:
    names = mesh.mesh_dim_names or ()
    if mesh.ndim != 1 and TENSOR_DIM not in names:
        raise ValueError(
            f"state: expected a DeviceMesh of one dimension, or with one called {TENSOR_DIM!r}, got {mesh}; "
            f"pass the dimension that is tensor-parallel, as in mesh['{names[-1] if names else 'model'}']"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(f"state: rank {dist.get_rank()} is not in {mesh}")
    return mesh.get_group(TENSOR_DIM if TENSOR_DIM in names else 0)


def _found_again(rank: int, size: int, tp_invariant: int = 0) -> TensorWorld:
    """Return the current world for an unpickled layer; raise unless rank and size are the same."""
    world = tensor_world(tp_invariant=tp_invariant)
    if (world.rank, world.size) != (rank, size):
        raise ParallelStateError(
            f"this layer was saved as tensor rank {rank} of {size}, and is loaded as rank {world.rank} of "
            f"{world.size}; load a state_dict of this rank's weights instead"
        )
    return world
