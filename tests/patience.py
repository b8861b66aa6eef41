"""Limits of time that a busy machine may take longer for: none may be what makes a test fail."""

import os
import time
from functools import lru_cache

MOST = 60.0  # times that a machine is taken to be slower
LOOK_SECONDS = 5.0  # for so long it is taken to be as busy as when that was measured


def patient(seconds: float) -> float:
    """`seconds` of an idle machine, on this one as loaded as it is now."""
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    slower = max(1.0, load, _wall_to_processor_time(int(time.monotonic() / LOOK_SECONDS)))
    return seconds * min(slower, MOST)


@lru_cache(maxsize=1)
def _wall_to_processor_time(moment: int) -> float:
    """Clock to processor time of a busy loop: shows at once what the average load shows after a minute."""
    wall, processor = time.perf_counter(), time.thread_time()
    while time.thread_time() - processor < 0.03:
        pass
    return (time.perf_counter() - wall) / 0.03
