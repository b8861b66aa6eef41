"""A rank that fails over a stand-in for NCCL, for which no host waits."""

from __future__ import annotations

import threading
from unittest.mock import patch

import pytest
import torch.distributed as dist

from tests.checks import error_of
from tests.on_ranks import on_ranks
from tests.patience import patient
from tpkernels.comm import calls
from tpkernels.comm.calls import Calls, begin, calls_of

SOON = 12.0  # seconds until all ranks know; about one on an idle machine


class StandIn:
    """A backend whose kernels wait until it is aborted, and with them what the host waits for."""

    def __init__(self) -> None:
        self.aborted = threading.Event()

    def abort(self) -> None:
        self.aborted.set()


def failing_op(group: dist.ProcessGroup) -> None:
    with calls_of(group):
        begin("row_linear", "sum", group)
        raise RuntimeError("planted")


@on_ranks(2)
def test_all_ranks_hear_of_a_failure_though_no_host_waits():
    nccl, group = StandIn(), dist.new_group()
    name = group.group_name  # of former tests' groups some have failed, and would be aborted, too
    ours = patch.object(Calls, "_of_nccl", lambda self: [nccl] if self.name == name else [])
    with patch.object(calls, "INTERVAL", 0.2), ours:
        own = calls_of(group)
        if dist.get_rank() == 1:
            with pytest.raises(RuntimeError, match="planted"):
                failing_op(group)
        assert nccl.aborted.wait(patient(SOON)), "the host waits for ever"
    kind, text = error_of(own.require_usable, "the next op")
    assert (kind, text.partition(". ")[0]) == (
        "RuntimeError",
        f"the next op: process group '{name}' has failed and cannot be used any more: rank 1: RuntimeError: "
        "planted",
    )
