"""Optimizers that take a shard for the full parameter, and the check that names them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.checks import error_of
from tests.optim.muon_cases import Matrices, cut, set_gradients, values_for
from tpkernels.interop import dcp
from tpkernels.interop.shards import shards_of
from tpkernels.optim import CombinedOptimizer, Muon, hidden_matrices, require_elementwise

KINDS: dict[str, Callable[[Any], Optimizer]] = {
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "Muon": lambda p: torch.optim.Muon(p, lr=0.1),
}


def wrong_on_shards(kind: str) -> tuple[float, str]:
    """How far weights are from those of the same optimizer on full matrices; what the check says of it."""
    model = Matrices(dist.get_world_size())
    start = values_for(model, "weights", 0, torch.float32)
    full = {name: nn.Parameter(tensor.clone()) for name, tensor in start.items()}
    ours, theirs = KINDS[kind](model.parameters()), KINDS[kind](list(full.values()))
    for step in range(3):
        gradients = values_for(model, "gradients", step, torch.float32)
        set_gradients(model, gradients)
        for name, parameter in full.items():
            parameter.grad = None if name.startswith("unused") else gradients[name].clone()
        ours.step()
        theirs.step()
    apart = [
        (shard.tensor.detach() - cut(shard, full[name].detach())).abs().max()
        for name, shard in shards_of(model).items()
    ]
    _, said = error_of(require_elementwise, ours, model)
    return float(torch.stack(apart).max()), said


class Adafactor(torch.optim.SGD):
    """A name that is known to be wrong."""


class OfAnotherPackage(torch.optim.AdamW):
    """A name that is not known."""


def told() -> dict[str, str]:
    model = Matrices(dist.get_world_size())
    sharded, replicated = model.row.weight, model.replicated.weight
    eight = type("AdamW", (torch.optim.AdamW,), {"__module__": "bitsandbytes.optim"})
    optimizers: dict[str, Optimizer] = {
        "strange": OfAnotherPackage([sharded, replicated]),
        "replicated": OfAnotherPackage([replicated]),
        "8 bits": eight([sharded]),
        "combined": CombinedOptimizer(
            torch.optim.AdamW([replicated]), Adafactor([sharded, model.wide.weight])
        ),
        "right": CombinedOptimizer(torch.optim.AdamW([replicated]), Muon([sharded], model=model)),
    }
    return {
        name: error_of(require_elementwise, optimizer, model)[1] for name, optimizer in optimizers.items()
    }


def combined(model: nn.Module) -> CombinedOptimizer:
    matrices, others = hidden_matrices(model)
    return CombinedOptimizer(Muon(matrices, lr=0.02, model=model), torch.optim.AdamW(others, lr=0.01))


def through_a_checkpoint(folder: str, tensor: int, resumed: bool) -> dict[str, Tensor]:
    """Weights after two steps under one optimizer of two; saved after the first, or resumed there."""
    model = Matrices(tensor)
    optimizer = combined(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for step in (0, 1):
        if step == 1 and resumed:
            dcp.load(folder, model, optimizer)
            optimizer.load_state_dict(optimizer.state_dict())
        elif step == 1:
            dcp.save(folder, model, optimizer)
        set_gradients(model, values_for(model, "gradients", step, torch.float32))
        if step == 1 or not resumed:
            optimizer.step()
            schedule.step()
    expected: dict[str, Tensor] = {}
    for name, shard in shards_of(model).items():
        expected[name] = shard.tensor.detach().clone()
    return expected | {"rates": torch.tensor([group["lr"] for group in optimizer.param_groups])}
