"""Combines several optimizers into one, and checks whether an optimizer is right on shards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tpkernels.interop.shards import shards_of, world_of
from tpkernels.layers.elementwise import problem_on_shards
from tpkernels.layers.world import State
from tpkernels.optim.muon import Muon, keep_momentum


class CombinedOptimizer(Optimizer):
    """Combines optimizers over different parameters: one `step`, one list of parameter groups, one state.

    Parameter groups are those of the optimizers, in their order. The optimizers share this one's state.
    """

    def __init__(self, *optimizers: Optimizer) -> None:
        if not optimizers:
            raise ValueError("CombinedOptimizer: expected one optimizer or more, got none")
        owned = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
        if len(set(owned)) < len(owned):
            raise ValueError(
                "CombinedOptimizer: expected different parameters in each optimizer, got some twice"
            )
        self.optimizers = optimizers
        self._counts = [len(optimizer.param_groups) for optimizer in optimizers]
        super().__init__([group for optimizer in optimizers for group in optimizer.param_groups], {})
        state: defaultdict[Tensor, Any] = defaultdict(dict)
        for optimizer in optimizers:
            state.update(optimizer.state)
        self.state = state
        self._share()

    def _share(self) -> None:
        """Give each optimizer its groups, and all optimizers one state."""
        start = 0
        for optimizer, count in zip(self.optimizers, self._counts, strict=True):
            optimizer.param_groups = self.param_groups[start : start + count]
            optimizer.state = self.state
            start += count

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step all optimizers; return the result of `closure`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, for all optimizers."""
        super().load_state_dict(state_dict)
        self._share()
        for optimizer in self.optimizers:
            if isinstance(optimizer, Muon):
                keep_momentum(optimizer, self, state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise, because groups belong to the combined optimizers."""
        if len(self.param_groups) >= sum(self._counts):
            raise ValueError(
                "CombinedOptimizer: add the group to one of the optimizers before they are combined"
            )
        super().add_param_group(param_group)


def require_elementwise(optimizer: Optimizer, model: nn.Module, *, state: State = None) -> None:
    """Raise unless the optimizer is known to be right on shards of matrices.

    No effect on one tensor-parallel rank, or for replicated parameters only. Subclasses of known optimizers
    under other names are unknown. The first step of an optimizer over our layers raises the same error if it
    is known to be wrong, and warns if it is unknown.

    state: as the model was built with; by default found in its layers
    """
    if world_of(model, state).size == 1:
        return
    split = {shard.tensor: name for name, shard in shards_of(model, state).items() if shard.dim is not None}
    for each in optimizer.optimizers if isinstance(optimizer, CombinedOptimizer) else (optimizer,):
        owned = [split[p] for group in each.param_groups for p in group["params"] if p in split]
        if problem := problem_on_shards(each, [f"'{name}'" for name in owned]):
            raise ValueError(f"require_elementwise: {problem}")
