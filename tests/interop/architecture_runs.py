"""What two ranks do with one architecture: five steps of AdamW, compared with the unsharded model's.

AdamW does not see how large a gradient is, so its norm at the first step is compared, too.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.interop.architectures import inputs_of, model_of
from tpkernels import clip_grad_norm_, initialize_model_parallel, parallelize

STEPS = 5
# Largest differences that are rounding: of a loss, of the gradients' norm and of outputs by their largest.
# Losses are float32 always, and some models compute in it whatever they are given; AdamW makes steps of it.
# Outputs may also differ as much as those of the unsharded model whose weights were rounded to float32.
ROUNDING = {"float64": (1e-6, 1e-6, 1e-4), "float32": (1e-4, 1e-5, 1e-3)}

Verdict = Literal["right", "wrong", "refused", "fails", "no plan"]


@dataclass(frozen=True)
class Outcome:
    """How a split model did.

    verdict: "refused" before it trained, "fails" while it did
    why: the error, of those two
    apart: the largest difference of the five losses, of the first gradients' norm (relative), and of the
        outputs after them (relative to the largest)
    losses: of the unsharded model, the first and the last
    held: numbers of the first rank, as a fraction of the unsharded model's
    """

    verdict: Verdict
    why: str = ""
    dtype: str = ""
    apart: tuple[float, float, float] | None = None
    losses: tuple[float, float] | None = None
    held: float = 1.0


@dataclass(frozen=True)
class Run:
    losses: list[float]
    norm: float
    outputs: Tensor

    def apart_from(self, expected: Run) -> tuple[float, float, float]:
        """As in `Outcome`."""
        return (
            max(abs(a - b) for a, b in zip(self.losses, expected.losses, strict=True)),
            abs(self.norm / expected.norm - 1),
            float((self.outputs - expected.outputs).abs().max() / expected.outputs.abs().max()),
        )


def ours(name: str, split: Callable[[nn.Module], nn.Module] = parallelize) -> Outcome:
    """Of `parallelize(model)` and nothing else."""
    initialize_model_parallel(dist.get_world_size())
    model, dtype = _in_widest_dtype(name)
    sharded = deepcopy(model)
    try:
        sharded = split(sharded)
    except Exception as error:
        return Outcome("refused", _told(error), dtype)
    return _compared(name, model, sharded, dtype, lambda: clip_grad_norm_(sharded.parameters(), 1e9))


def theirs(name: str, folder: str) -> Outcome:
    """Of the tensor parallelism of `transformers`, which splits what it loads from a folder."""
    config = import_module("transformers.distributed").DistributedConfig
    model, dtype = _in_widest_dtype(name)
    if not model.tp_plan:
        return Outcome("no plan")
    os.environ.update(RANK=str(dist.get_rank()), LOCAL_RANK="0", WORLD_SIZE=str(dist.get_world_size()))
    path = os.path.join(folder, name)
    if dist.get_rank() == 0:
        model.save_pretrained(path)  # type: ignore[operator]
    dist.barrier()
    try:
        sharded = type(model).from_pretrained(  # type: ignore[attr-defined]
            path, dtype=getattr(torch, dtype), distributed_config=config(tp_size=dist.get_world_size())
        )
        sharded.train()
    except Exception as error:
        return Outcome("refused", _told(error), dtype)
    return _compared(name, model, sharded, dtype, lambda: _full_norm(sharded))


def _compared(
    name: str, model: nn.Module, sharded: nn.Module, dtype: str, norm: Callable[[], Tensor]
) -> Outcome:
    untrained = deepcopy(model)
    expected = _trained(model, name, lambda: _full_norm(model))
    try:
        found = _trained(sharded, name, norm)
    except Exception as error:
        return Outcome("fails", _told(error), dtype)
    apart = found.apart_from(expected)
    losses, gradients, outputs = ROUNDING[dtype]
    if apart[2] > outputs:
        outputs = _rounded(untrained, name).apart_from(expected)[2]
    is_right = apart[0] <= losses and apart[1] <= gradients and apart[2] <= outputs  # NaN is not
    return Outcome(
        "right" if is_right else "wrong",
        dtype=dtype,
        apart=apart,
        losses=(expected.losses[0], expected.losses[-1]),
        held=_numbers(sharded) / _numbers(model),
    )


def _trained(model: nn.Module, name: str, norm: Callable[[], Tensor]) -> Run:
    torch.manual_seed(3)  # what is drawn in train mode
    inputs = _fitting(model, inputs_of(name))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    losses, norms = [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(**inputs).loss
        loss.backward()
        norms.append(float(norm()))
        optimizer.step()
        losses.append(float(_full(loss)))
    with torch.no_grad():
        output = model(**inputs)
    outputs = output.logits_per_image if "logits_per_image" in output else output.logits
    return Run(losses, norms[0], _full(outputs))


def _rounded(model: nn.Module, name: str) -> Run:
    """Of the unsharded model whose weights were rounded: some models multiply that by millions."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 2**-24 * torch.randn_like(parameter))
    return _trained(model, name, lambda: _full_norm(model))


def _in_widest_dtype(name: str) -> tuple[nn.Module, str]:
    """In float64, if it runs in that."""
    model = model_of(name)
    try:
        deepcopy(model).double()(**_fitting(model.double(), inputs_of(name)))
    except RuntimeError:
        return model_of(name), "float32"
    return model, "float64"


def _fitting(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
    dtype = next(model.parameters()).dtype
    return {
        key: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for key, value in inputs.items()
    }


def _full_norm(model: nn.Module) -> Tensor:
    gradients = [_full(p.grad).double() for p in model.parameters() if p.grad is not None]
    return torch.nn.utils.get_total_norm(gradients)


def _full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def _numbers(model: nn.Module) -> int:
    """That this rank holds."""
    local = (p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())
    return sum(tensor.numel() for tensor in local)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")
