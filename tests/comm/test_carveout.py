"""Processors that products leave to collectives in flight, as torch's setting and our launches have them."""

from __future__ import annotations

import gc
from collections import Counter
from datetime import timedelta
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.comm.counting import group_of, standing_in_for
from tests.segments import in_op
from tpkernels.comm.carveout import UNKNOWN_BLOCKS, CollectivesInFlight, blocks_of
from tpkernels.dispatch import primitives
from tpkernels.dispatch.timing import rounds
from tpkernels.env import NCCL_BLOCKS
from tpkernels.groups.c10d import options_beside_products
from tpkernels.kernels.target import H100, INTERPRETER, left_free
from tpkernels.ops import column_linear, row_linear
from tpkernels.reserved_sms import Reservation, torchs_settings

setting, set_to = torch._C._get_sm_carveout_experimental, torch._C._set_sm_carveout_experimental
ALL, BESIDE = H100.processors, H100.processors - NCCL_BLOCKS


@pytest.fixture(params=[None, 8], ids=["unset", "set by the user"])
def users(request):
    gc.collect()  # calls that tests before left in flight end now, not later
    set_to(request.param)
    yield request.param or 0
    assert setting() == request.param
    set_to(None)


def test_products_beside_a_collective_leave_it_processors_and_others_take_all(users):
    """A large layer over NCCL: of each launch of a product, how many programs it has."""
    meta = {"device": "meta", "dtype": torch.bfloat16}
    x, shard = torch.empty(1024, 4096, **meta), torch.empty(8192, 14336 // 8, **meta)
    up, down = torch.empty(14336 // 8, 4096, **meta), torch.empty(4096, 14336 // 8, **meta)
    found = {}
    with group_of(8) as group, standing_in_for(H100, "c10d", Counter()) as launches:
        for name, op, operands in (("column", column_linear, (x, up)), ("row", row_linear, (shard, down))):
            leaves = [t.requires_grad_() for t in operands]
            y = op(*leaves, None, group, sequence_parallel=True)
            found[f"{name} forward"] = _programs(launches)
            torch.autograd.grad(y, leaves, torch.empty_like(y))
            found[f"{name} backward"] = _programs(launches)
    assert found == {
        "column forward": [ALL - users],  # all rows are awaited: one round
        "column backward": [BESIDE - users, BESIDE - users],  # beside the gather of x, then the sums of dx
        "row forward": [ALL - users, BESIDE - users],  # the second round beside the sums of the first
        "row backward": [ALL - users, ALL - users],
    }


def _programs(launches):
    found = [one.grid[0] for one in launches if one.kernel.__name__.endswith(("fwd_kernel", "grad_kernel"))]
    launches.clear()
    return found


def test_groups_at_once_add_up_and_collectives_of_one_group_do_not(users):
    one, other = (SimpleNamespace(group_name=name, _get_backend=lambda _: None) for name in "ab")
    carveout, device = CollectivesInFlight(), torch.device("meta")
    steps = [(one, 1), (one, 1), (other, 2), (one, 2), (one, 1), (other, 0)]
    for number, (group, expected) in enumerate(steps):
        carveout.begin(group, device) if number < 3 else carveout.end(group)
        assert (setting() or 0) == users + expected * UNKNOWN_BLOCKS
    with in_op(8):  # cuBLAS keeps the kernels that it has on a rank alone
        carveout.begin(one, device)
        assert (setting() or 0) == users
        carveout.end(one)


def test_after_an_error_no_processors_stay_left(users):
    """Of a backward that ends while x is gathered: the group is given up, and its transfers with it."""
    meta = {"device": "meta", "dtype": torch.bfloat16}
    x, up = torch.empty(1024, 4096, **meta).requires_grad_(), torch.empty(1792, 4096, **meta).requires_grad_()
    with group_of(8) as group, standing_in_for(H100, "c10d", Counter()):
        y = column_linear(x, up, None, group, sequence_parallel=True)
        with patch.object(primitives, "dgrad", side_effect=MemoryError), pytest.raises(MemoryError):
            torch.autograd.grad(y, [x, up], torch.empty_like(y))
    gc.collect()
    assert (setting() or 0) == users


def test_kernels_are_timed_with_all_processors_that_the_user_leaves(users):
    seen, settings, of_group = [], torchs_settings(), Reservation(16, 66)
    settings.begin(of_group)
    rounds(["one"], lambda _: seen.append(setting() or 0) or 1.0, exactly=1)
    assert (seen, setting()) == ([users], users + 16)
    settings.end(of_group)


@pytest.mark.parametrize(("most", "expected"), [(-(2**31), UNKNOWN_BLOCKS), (4, 4), (64, 64)])
def test_blocks_are_those_that_the_options_of_the_group_allow(most, expected):
    backend = SimpleNamespace(options=SimpleNamespace(config=SimpleNamespace(max_ctas=most)))
    assert blocks_of(SimpleNamespace(_get_backend=lambda _: backend), torch.device("meta")) == expected


def test_a_product_keeps_half_of_the_processors(users):
    set_to(1000)
    assert left_free(INTERPRETER) == INTERPRETER.processors // 2
    assert left_free(H100, margin=16) == 16 + (ALL - 16) // 2
    set_to(users or None)


def test_tensor_groups_of_nccl_have_priority_and_no_more_blocks_than_are_left_free(monkeypatch):
    options = SimpleNamespace(config=SimpleNamespace())
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=lambda: options), raising=False)
    for backend in ("nccl", "cpu:gloo,cuda:nccl"):
        assert options_beside_products(backend, timedelta(seconds=3)) is options
        assert (options.is_high_priority_stream, options.config.max_ctas) == (True, NCCL_BLOCKS)
        assert options._timeout == timedelta(seconds=3)
    assert options_beside_products("gloo", timedelta(seconds=3)) is None
