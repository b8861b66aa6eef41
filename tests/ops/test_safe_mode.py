"""TPKERNELS_SAFE=1: torch.distributed, torch's products, and nothing overlaps."""

from __future__ import annotations

import subprocess
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.on_ranks import on_ranks
from tests.programs import ran
from tpkernels.comm import tensor_parallel
from tpkernels.comm.calls import calls_of
from tpkernels.comm.transports import select
from tpkernels.dispatch import backends
from tpkernels.ops import parallel_mlp

READ = """
from tpkernels import ops
from tpkernels.comm import tensor_parallel
from tpkernels.comm.transports import select
from tpkernels.dispatch import backends
print(select.requested_transport, backends.backend, tensor_parallel.safe)
"""


def read_by(**environment: str) -> subprocess.CompletedProcess[str]:
    return ran("-c", READ, environment=environment)


def test_the_variable_means_three_settings():
    assert read_by(TPKERNELS_SAFE="1").stdout == "c10d torch True\n"


@pytest.mark.parametrize(
    "setting", [{"TPKERNELS_TRANSPORT": "shared"}, {"TPKERNELS_BACKEND": "triton"}], ids=str
)
def test_a_setting_that_it_contradicts_is_refused(setting):
    ((name, value),) = setting.items()
    said = read_by(TPKERNELS_SAFE="1", **setting).stderr.splitlines()[-1]
    assert said.startswith(f"ValueError: TPKERNELS_SAFE=1 takes {name}=")
    assert said.endswith(f"got '{value}'; unset one of them")


def step(overlap: bool) -> tuple[list[Tensor], list[str]]:
    """An MLP with its gradients, in a group of its own; and its calls, with their transports."""
    group, generator = dist.new_group(), torch.Generator().manual_seed(7)
    x, up, down = (
        torch.randn(size, generator=generator).requires_grad_()
        for size in ((512, 256), (512, 256), (256, 512))
    )
    y = parallel_mlp(
        x, up, None, down, None, group, activation="gelu", sequence_parallel=True, overlap=overlap
    )
    grads = torch.autograd.grad(y.square().sum(), [x, up, down])
    kinds, splits = calls_of(group).kinds.values(), calls_of(group).splits.values()
    transports = sorted(f"{kind.described} {type(kind.transport).__name__}" for kind in kinds)
    return [y, *grads], transports + [f"overlap: {split.overlap}" for split in splits]


@on_ranks(2)
def test_its_bits_are_those_of_the_three_settings():
    usual = step(overlap=True)
    with (
        patch.object(select, "requested_transport", "c10d"),
        patch.object(backends, "backend", "torch"),
    ):
        in_turn = step(overlap=False)
        with patch.object(tensor_parallel, "safe", True):
            safe = step(overlap=True)
    assert safe[1] == in_turn[1] != usual[1]
    assert all(torch.equal(*pair) for pair in zip(safe[0], in_turn[0], strict=True))
