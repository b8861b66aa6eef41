"""A process group that is used for long, and may have ended meanwhile."""

from __future__ import annotations

import os
from weakref import ref

from torch.distributed import ProcessGroup

from tpkernels.comm.calls import calls_of, is_alive


class LiveGroup:
    """A process group, checked before each use: torch lets a destroyed group go on silently, and a
    collective in a forked process hangs.

    Held weakly. A group that is destroyed but still held keeps its threads; one of them may then outlive the
    interpreter with a finished collective in its hands, and abort the process.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = ref(group)
        self._process = os.getpid()
        self.name = str(group.group_name)
        self.size, self.rank = group.size(), group.rank()

    def get(self) -> ProcessGroup:
        """Return the group if it may be used now; else raise an error."""
        if os.getpid() != self._process:
            raise RuntimeError(
                f"GradientBuckets made in process {self._process} cannot be used in process {os.getpid()}, "
                "which was forked from it; make process groups and GradientBuckets after the fork"
            )
        group = self._group()
        if group is None or not is_alive(group):
            raise RuntimeError(
                f"process group '{self.name}' was destroyed; make a new group and new GradientBuckets"
            )
        calls_of(group).require_usable("GradientBuckets")
        return group
