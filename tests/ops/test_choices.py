"""Which autotuners are given the store of the world, and when."""

from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.on_ranks import on_ranks
from tpkernels.dispatch import backends, primitives
from tpkernels.ops.tensor_parallel.column_linear import column_linear
from tpkernels.ops.tensor_parallel.flag_waits import FLAG_KERNELS, FlagKernels


class Tuner:
    def __init__(self):
        self.given, self.extended = [], []

    def agree_through(self, store, extend_waits):
        self.given.append(store)
        extend_waits(timedelta(seconds=30))


@pytest.fixture
def tuner(monkeypatch):
    made = Tuner()
    monkeypatch.setattr(primitives, "autotuner_on", lambda device: made)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed_c10d, "_get_default_store", lambda: "the store")
    monkeypatch.setattr(distributed_c10d, "_add_ephemeral_timeout_for_all_pgs", made.extended.append)
    return made


@pytest.mark.parametrize(
    ("device", "resolved", "given"),
    [("cuda", "fastest", ["the store"]), ("cuda", "torch", []), ("cpu", "fastest", [])],
)
def test_the_autotuner_of_a_gpu_is_given_the_worlds_store(device, resolved, given, tuner, monkeypatch):
    monkeypatch.setattr(backends, "resolve_backend", lambda device: resolved)
    FLAG_KERNELS.agree_choices(torch.device(device))
    assert tuner.given == given
    assert tuner.extended == [timedelta(seconds=30)] * len(given)


@on_ranks(2)
def test_a_group_asks_once_for_each_kind_of_call():
    x, weight = torch.ones(2, 4), torch.ones(3, 4)
    group = dist.new_group()
    with patch.object(FlagKernels, "agree_choices") as asked:
        for _ in range(3):
            column_linear(x, weight, None, group, sequence_parallel=True)
    asked.assert_called_once_with(torch.device("cpu"))
