"""Random numbers in training: what one rank would draw, on the ranks of a tensor group.

Their random streams agree, as seeded alike, and go on alike: for a tensor that all ranks hold, torch's own
dropout draws the same mask on each; for features that ranks split, each takes its own of the mask of all.
So `torch.utils.checkpoint` draws them again as it does without tensor parallelism.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tpkernels.interop.parallelize.cut import Cut
from tpkernels.layers import watch
from tpkernels.layers.world import TensorWorld
from tpkernels.ops.replicas import from_all_ranks
from tpkernels.runtime.random import is_capturing


class SplitDropout(nn.Dropout):
    """Of features that ranks split, in the last dimension.

    features: this rank's
    """

    def __init__(self, p: float, features: Cut) -> None:
        super().__init__(p)
        self.features = features

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or not self.p:
            return input
        mask = F.dropout(input.new_ones(*input.shape[:-1], self.features.full), self.p)
        return input * self.features.of(mask)


def require_equal_draws(model: nn.Module, world: TensorWorld) -> None:
    """From now on an error in training, on all ranks, if the model draws and random streams differ."""
    if world.size > 1 and dist.get_backend(world.group) != "fake":
        draws = _Draws(world)
        model.register_forward_pre_hook(draws.before)
        model.register_forward_hook(draws.after)


class _Draws:
    """Compares in the first call of a model in train mode, then in every N-th: see `layers.watch`."""

    def __init__(self, world: TensorWorld) -> None:
        self.world = world
        self.calls = 0
        self.states: list[Tensor] | None = None

    def before(self, model: nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling() or not model.training or not watch.steps_between:
            return
        if is_capturing():
            return
        self.states = _states(model) if self.calls % watch.steps_between == 0 else None
        self.calls += 1

    def after(self, model: nn.Module, *_: Any) -> None:
        if torch.compiler.is_compiling() or self.states is None:
            return
        states, self.states = self.states, None
        pairs = zip(states, _states(model), strict=True)
        own = [0 if torch.equal(first, last) else _number(first) for first, last in pairs]
        rows = from_all_ranks(torch.tensor(own, device=_device(model)), self.world.group).tolist()
        others = [str(rank) for rank, row in enumerate(rows) if row != rows[0]]
        if others:
            raise RuntimeError(
                "parallelize: dropout differs between tensor-parallel ranks, for their random streams do. "
                "Seed torch alike on all ranks of a tensor group, and draw as much on each: in this forward "
                f"tensor rank {', '.join(others)} drew other numbers than rank 0"
            )


def _states(model: nn.Module) -> list[Tensor]:
    device = _device(model)
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def _device(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def _number(state: Tensor) -> int:
    return int.from_bytes(hashlib.blake2b(state.numpy().tobytes(), digest_size=7).digest(), "big")
