"""Sums of the backend as a candidate: where the user allows its order, and it is fastest."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.on_ranks import on_ranks
from tests.ops.parallel_cases import Setting, prepare
from tests.ops.test_ways import FEATURES, ROWS, VERSIONS, as_on_gpus, furthest
from tests.ops.transport_cases import using
from tpkernels.comm import tensor_parallel
from tpkernels.comm.transports import select
from tpkernels.comm.transports.c10d import BackendSums
from tpkernels.dispatch.cache import Cache
from tpkernels.ops.tensor_parallel import ways
from tpkernels.ops.tensor_parallel.row_linear import row_linear
from tpkernels.ops.tensor_parallel.ways import mismatch


@pytest.mark.parametrize("scatter", [False, True])
@pytest.mark.parametrize(("allowed", "seconds"), [("timed", 1.0), ("timed", 8.0), ("0", 1.0)])
@on_ranks(2)
def test_the_backend_sums_where_it_may_and_is_fastest(allowed, seconds, scatter):
    """A trial of a sum of all rows ends with all rows, whoever adds."""
    prepare(Setting())
    group, x, weight = dist.new_group(), torch.randn(ROWS, 8), torch.randn(FEATURES, 8)
    with using("c10d"):
        expected = row_linear(x, weight, None, dist.new_group(), sequence_parallel=scatter)
    of = {"the backend's sum": seconds, "1 collective": 4.0, "2 collectives": 3.0}
    with (
        as_on_gpus(of, Cache(None, VERSIONS)) as said,
        patch.object(tensor_parallel, "backend_sums", allowed),
        patch.object(ways, "mismatch", wraps=mismatch) as compared,
        patch.object(BackendSums, "_started", autospec=True, side_effect=BackendSums._started) as started,
    ):
        found = row_linear(x, weight, None, group, sequence_parallel=scatter)
        (chosen,) = select._of_group[id(group)].chosen.values()
        tried = started.call_count
        row_linear(x, weight, None, group, sequence_parallel=scatter)
    assert isinstance(chosen, BackendSums) == (allowed == "timed" and seconds == 1.0), said
    assert (tried > 0) == (allowed == "timed")
    assert started.call_count - tried == isinstance(chosen, BackendSums)
    assert furthest([found], [expected]) < 1e-6
    for call in compared.call_args_list:
        assert furthest(*call.args) < 1e-6
