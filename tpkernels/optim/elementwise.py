"""An optimizer is asked before the first step whether it is right on shards."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from tpkernels.interop.shards import shards_of, world_of
from tpkernels.layers.elementwise import problem_on_shards
from tpkernels.layers.world import State
from tpkernels.optim.combined import CombinedOptimizer


def require_elementwise(optimizer: Optimizer, model: nn.Module, *, state: State = None) -> None:
    """Raise if the optimizer would take a shard of a matrix for the full one, or is not known not to.

    Without effect on one tensor-parallel rank, and on optimizers of replicated parameters only. Subclasses of
    known optimizers under other names are not known: what they add is theirs to say. The first step of an
    optimizer over layers raises the same error if it is known to be wrong, and warns if it is not known.

    state: as the model was built with; by default found in its layers
    """
    if world_of(model, state).size == 1:
        return
    split = {shard.tensor: name for name, shard in shards_of(model, state).items() if shard.dim is not None}
    for each in optimizer.optimizers if isinstance(optimizer, CombinedOptimizer) else (optimizer,):
        owned = [split[p] for group in each.param_groups for p in group["params"] if p in split]
        if problem := problem_on_shards(each, [f"'{name}'" for name in owned]):
            raise ValueError(f"require_elementwise: {problem}")
