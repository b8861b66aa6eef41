"""Limits of time that a busy machine may take longer for: none may be what makes a test fail."""

import os
import time

MOST = 60.0  # times that a machine is taken to be slower


def patient(seconds: float) -> float:
    """`seconds` of an idle machine, on this one as loaded as it is now."""
    slower = max(1.0, _SLOWDOWN, os.getloadavg()[0] / (os.cpu_count() or 1))
    return seconds * min(slower, MOST)


def _wall_to_processor_time() -> float:
    """Clock to processor time of a busy loop: shows at once what the average load shows after a minute."""
    wall, processor = time.perf_counter(), time.process_time()
    while time.process_time() - processor < 0.05:
        pass
    return (time.perf_counter() - wall) / 0.05


_SLOWDOWN = _wall_to_processor_time()
