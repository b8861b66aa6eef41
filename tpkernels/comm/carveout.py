"""Processors of a GPU that collectives in flight occupy; products launched meanwhile leave them free.

NCCL runs a kernel of some blocks, each on a processor of its own. A persistent product counts on these
processors, too: it takes a second full wave if NCCL came first, else it keeps NCCL out until it ends. torch
has a setting of how many processors products leave free, which cuBLASLt and our kernels read when they are
launched (`kernels.target.left_free`). It is raised while a collective is in flight, as the host sees it:
from its start until the stream that computes waits for it. Kernels launched before have ended when it
begins. Collectives of one group follow each other, those of several run at once.

Not with TP-invariance: where fewer processors are left cuBLAS may take a kernel with other bits, and a rank
alone has nothing in flight.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.distributed import ProcessGroup

from tpkernels.comm.calls import calls_so_far
from tpkernels.env import NCCL_BLOCKS
from tpkernels.tp_invariance import segments_of_op


class CollectivesInFlight:
    """Counts collectives that are in flight in this process, and has products leave processors to them."""

    def __init__(self) -> None:
        self._lock = (
            threading.RLock()
        )  # autograd has threads of its own; a collection may end a call in `begin`
        self._in_flight: dict[int, int] = {}  # collectives, by the id of their group, which they hold
        self._blocks: dict[int, int] = {}  # of the groups among these

    def begin(self, group: ProcessGroup, device: torch.device) -> None:
        """Count a collective of the group that has been started."""
        name = id(group)
        with self._lock:
            self._in_flight[name] = number = self._in_flight.get(name, 0) + 1
            if number == 1:
                self._blocks[name] = _known_blocks_of(group, device)
                _add(self._blocks[name])

    def end(self, group: ProcessGroup) -> None:
        """Count a collective as finished: the computing stream waits for it, or no stream will."""
        name = id(group)
        with self._lock:
            self._in_flight[name] = left = self._in_flight[name] - 1
            if not left:
                del self._in_flight[name]
                _add(-self._blocks.pop(name))


IN_FLIGHT = CollectivesInFlight()


def _add(processors: int) -> None:
    """Raise torch's setting: what the user has set, or gradient buckets have (`csrc/carveout.h`), stays."""
    total = (torch._C._get_sm_carveout_experimental() or 0) + processors
    torch._C._set_sm_carveout_experimental(total if total > 0 else None)


def _known_blocks_of(group: ProcessGroup, device: torch.device) -> int:
    """`blocks_of`, asked once of a group that has calls: it keeps the options that it was made with."""
    calls, key = calls_so_far(group), (device, segments_of_op())
    blocks = None if calls is None else calls.blocks.get(key)
    if blocks is None:
        blocks = blocks_of(group, device)
        if calls is not None:
            calls.blocks[key] = blocks
    return blocks


def blocks_of(group: ProcessGroup, device: torch.device) -> int:
    """Return how many processors products leave to a collective of the group: as many as NCCL has blocks.

    None on a CPU, and with TP-invariance. Of a small GPU an eighth at most.
    """
    if segments_of_op() or device.type == "cpu":
        return 0
    try:
        options: Any = group._get_backend(device).options
        most = int(options.config.max_ctas)
    except (AttributeError, RuntimeError):  # a wrapped, plugged-in or fake backend
        most = 0
    blocks = min(most, NCCL_BLOCKS) if most > 0 else NCCL_BLOCKS
    if device.type != "cuda":
        return blocks
    return min(blocks, torch.cuda.get_device_properties(device).multi_processor_count // 8)
