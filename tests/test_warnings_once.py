"""What all ranks find alike is said by one of them."""

from __future__ import annotations

import warnings

import torch.distributed as dist

from tests.on_ranks import of_all, on_ranks
from tests.ops.transport_cases import heard
from tpkernels import errors as saying
from tpkernels.dispatch import log


@on_ranks(2)
def test_one_rank_of_a_machine_warns_and_logs():
    with heard("tpkernels.dispatch") as logged, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        log.warnings.warning("found by %s", "all")
        log.warnings.warning("found by rank %d", dist.get_rank())
        saying.warn("all are warned", stacklevel=1)
    logs, warns = zip(*of_all((logged, [str(one.message) for one in warned])), strict=True)
    assert sorted(logs[0] + logs[1]) == ["found by all", "found by rank 0", "found by rank 1"]
    assert warns[0] + warns[1] == ["all are warned"]
