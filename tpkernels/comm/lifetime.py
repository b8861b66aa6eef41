"""Whether a process group lives, and how a process ends well that still holds groups which it destroyed.

A thread of gloo's takes Python's lock to let go of a finished collective's tensors. Whoever asks for that
lock while the interpreter ends is ended with it, which C++ answers by an abort of the process. Nothing of
this happens after `destroy_process_group`, which ends the threads; but only where nobody holds the group
any more, and a program that says `group = state.process_group("tp")` at its top level holds it to the last.
So destroyed groups are made to end their threads while the interpreter is still whole.
"""

from __future__ import annotations

import atexit
import os
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed import ProcessGroup

from tpkernels.comm._ext import ExtensionState, extension

# Functions of torch's take the default group for a default argument there. Imported when there is one already
# (the first optimizer does, by way of torch.compile), they hold it to the last; imported earlier, None.
if not dist.is_initialized():
    import torch.distributed.nn.functional

LONGEST_WAIT = (
    5.0  # seconds, for a collective that other ranks keep in flight: it may not keep us from ending
)

_used: WeakSet[ProcessGroup] = WeakSet()
os.register_at_fork(after_in_child=_used.clear)  # which has none of the threads


def note_use(group: ProcessGroup) -> None:
    """Remember, without holding it, that `group` has collectives of ours."""
    _used.add(group)


def is_alive(group: ProcessGroup) -> bool:
    """Whether `group` is still registered under its name."""
    try:
        return c10d._resolve_process_group(group.group_name) is group
    except RuntimeError:
        return False


@atexit.register
def end_threads_of_destroyed_groups() -> None:
    """Other groups are left alone: what runs after us at exit may need them."""
    destroyed = [group for group in _used if not is_alive(group)]
    if destroyed and extension().state is ExtensionState.LOADED:
        for group in destroyed:
            torch.ops.tpkernels.end_backends(group.boxed(), LONGEST_WAIT)
