"""The ranks of a group that run on one machine, under a name by which torch's rendezvous finds them.

What bears the name has a store and no backend: nothing is connected, and no collective can be called on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, cast
from weakref import WeakKeyDictionary, finalize

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed import ProcessGroup, distributed_c10d

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName

_of_group: WeakKeyDictionary[ProcessGroup, ProcessGroup] = WeakKeyDictionary()  # torch holds them weakly


def name_of_neighbours(group: ProcessGroup, near: Sequence[int]) -> GroupName:
    """Of those with the numbers `near` in `group`, this rank among them; known as long as the group lives."""
    name = cast("GroupName", f"{group.group_name}, ranks {', '.join(map(str, near))}")
    if group not in _of_group:
        store = dist.PrefixStore(name, distributed_c10d._get_process_group_store(group))
        _of_group[group] = ProcessGroup(store, near.index(group.rank()), len(near))
        c10d._register_process_group(name, _of_group[group])
        finalize(group, _forget, name)
    return name


def _forget(name: GroupName) -> None:
    with suppress(RuntimeError):  # destroy_process_group() forgets all names at once
        c10d._unregister_process_group(name)
