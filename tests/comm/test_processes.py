"""Whether a process still runs, with descriptors of processes and without."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from unittest.mock import patch

import pytest

from tpkernels.comm.transports.processes import Process, process_of


@pytest.mark.parametrize("how", ["descriptor", "proc"])
def test_a_process_that_was_killed_has_ended_before_it_is_reaped(how):
    refused = patch.object(os, "pidfd_open", side_effect=OSError)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as running:
        if how == "proc":
            with refused:
                process = Process(running.pid)
        else:
            process = Process(running.pid)
        assert not process.has_ended()
        running.kill()
        deadline = time.monotonic() + 10
        while not process.has_ended():
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert process.has_ended()
    if how == "proc":
        with refused:
            assert Process(running.pid).has_ended()


def test_one_descriptor_serves_all_who_watch_a_process():
    before = len(os.listdir("/proc/self/fd"))
    first, second = process_of(os.getppid()), process_of(os.getppid())
    assert first is second
    assert len(os.listdir("/proc/self/fd")) == before + 1
    del first, second
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
