"""RMSNorm and LayerNorm against torch's own, forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from bench.case import Case, Work
from bench.cases.differentiated import differentiated
from bench.measure import Seconds
from tpkernels import ops

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
SIZES = [(8192, 4096), (8192, 8192)] if ON_GPU else [(256, 256)]
ROUNDS = 21


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(DTYPE).requires_grad_()


def rms_norm(tokens: int, features: int) -> Case:
    return differentiated(
        work("rms_norm", tokens, features),
        ops.rms_norm,
        lambda x, weight: F.rms_norm(x, (features,), weight, eps=1e-5),
        [normal(tokens, features), normal(features)],
    )


def layer_norm(tokens: int, features: int) -> Case:
    return differentiated(
        work("layer_norm", tokens, features),
        ops.layer_norm,
        lambda x, weight, bias: F.layer_norm(x, (features,), weight, bias),
        [normal(tokens, features), normal(features), normal(features)],
    )


def work(op: str, tokens: int, features: int) -> Work:
    return Work(
        op=op,
        shape=f"{tokens}x{features}",
        pass_="forward_backward",
        naive=f"F.{op}",
        dtype=DTYPE,
        device=DEVICE,
        flops=0,
        bytes=DTYPE.itemsize * 5 * tokens * features,  # x and y, then x, dy and dx
    )


@pytest.mark.smoke
@pytest.mark.gpu_set
@pytest.mark.parametrize(("tokens", "features"), SIZES)
@pytest.mark.parametrize("build", [rms_norm, layer_norm], ids=lambda build: build.__name__)
def test_norm(
    record: Callable[[Work, Seconds], None], build: Callable[[int, int], Case], tokens: int, features: int
) -> None:
    torch.manual_seed(0)
    case = build(tokens, features)
    record(case.work, case.time(ROUNDS))
