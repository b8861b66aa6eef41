"""SMs that collectives in flight occupy; products launched meanwhile leave them free.

They are reserved while a collective is in flight, as the host sees it: from its start until the stream that
computes waits for it. Kernels launched before have ended when it begins. Collectives of one group follow each
other, those of several run at once. `reserved_sms` says which libraries obey, and writes torch's settings.

Not with TP-invariance: where fewer SMs are left cuBLAS may take a kernel with other bits, and a rank alone
has nothing in flight.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.distributed import ProcessGroup

from tpkernels.comm.calls import calls_so_far
from tpkernels.reserved_sms import Reservation, torchs_settings, way_beside_collectives
from tpkernels.tp_invariance import segments_of_op

UNKNOWN_BLOCKS = 32  # of a group of NCCL whose options do not say: its own choice is 16 to 32
_MANY = 2**15  # SMs: more than a GPU has


class CollectivesInFlight:
    """Counts collectives that are in flight in this process, and reserves SMs for them."""

    def __init__(self) -> None:
        self._lock = (
            threading.RLock()
        )  # autograd has threads of its own; a collection may end a call in `begin`
        self._in_flight: dict[int, int] = {}  # collectives, by the id of their group, which they hold
        self._reserved: dict[int, tuple[Reservation, Any]] = {}  # by these groups, and where that is written

    def begin(self, group: ProcessGroup, device: torch.device) -> None:
        """Count a collective of the group that has been started."""
        name = id(group)
        with self._lock:
            self._in_flight[name] = number = self._in_flight.get(name, 0) + 1
            if number == 1:
                reservation, settings = _known_reservation_of(group, device), torchs_settings()
                self._reserved[name] = reservation, settings
                settings.begin(reservation)

    def end(self, group: ProcessGroup) -> None:
        """Count a collective as finished: the computing stream waits for it, or no stream will."""
        name = id(group)
        with self._lock:
            self._in_flight[name] = left = self._in_flight[name] - 1
            if not left:
                del self._in_flight[name]
                reservation, settings = self._reserved.pop(name)
                settings.end(reservation)


IN_FLIGHT = CollectivesInFlight()


def _known_reservation_of(group: ProcessGroup, device: torch.device) -> Reservation:
    """`reservation_of`, asked once of a group that has calls: it keeps the options that it was made with."""
    calls, key = calls_so_far(group), (device, segments_of_op())
    known = None if calls is None else calls.reservations.get(key)
    if known is None:
        known = reservation_of(group, device)
        if calls is not None:
            calls.reservations[key] = known
    return known


def reservation_of(group: ProcessGroup, device: torch.device) -> Reservation:
    """Return what collectives of the group reserve: as many SMs as NCCL may have blocks.

    Nothing on a CPU, and with TP-invariance. All groups together reserve half of a GPU at most.
    """
    if segments_of_op() or device.type == "cpu":
        return Reservation()
    blocks = blocks_of(group, device)
    if device.type != "cuda":
        return Reservation(blocks, _MANY)
    gpu = torch.cuda.get_device_properties(device)
    prefers_lt = way_beside_collectives(gpu.name) == "cublaslt"
    return Reservation(blocks, gpu.multi_processor_count // 2, prefers_lt)


def blocks_of(group: ProcessGroup, device: torch.device) -> int:
    """Return how many blocks NCCL may take for a collective of the group."""
    try:
        options: Any = group._get_backend(device).options
        most = int(options.config.max_ctas)
    except (AttributeError, RuntimeError):  # a wrapped, plugged-in or fake backend
        most = 0
    return most if most > 0 else UNKNOWN_BLOCKS
