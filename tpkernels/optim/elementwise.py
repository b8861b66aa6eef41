"""Which optimizers are right on shards: those that update each element from that element's gradients alone."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from tpkernels.interop.shards import shards_of, world_of
from tpkernels.layers.world import State
from tpkernels.optim.combined import CombinedOptimizer
from tpkernels.optim.muon import Muon

# By class name, wherever a class comes from. torch's, and those of packages that users name most.
ELEMENTWISE = frozenset("Adadelta Adagrad Adam Adamax AdamW ASGD Lion NAdam RAdam RMSprop Rprop SGD".split())
_WHY = {
    "Adafactor": "its factors are means over rows and columns, and it scales by the norm of the parameter",
    "LAMB": "it scales by the norms of the parameter and the update",
    "LARS": "it scales by the norms of the parameter and the gradient",
    "LBFGS": "its inner products are over all parameters",
    "Muon": "it orthogonalizes the matrix; use tpkernels.optim.Muon",
    "Shampoo": "its factors are products of the matrix with itself",
    "SOAP": "its factors are products of the matrix with itself",
    "8bit": "blocks of elements share a scale, and a shard has other blocks",
}


def require_elementwise(optimizer: Optimizer, model: nn.Module, *, state: State = None) -> None:
    """Raise if the optimizer would take a shard of a matrix for the full one, or is not known not to.

    Without effect on one tensor-parallel rank, and on optimizers of replicated parameters only. Subclasses of
    known optimizers under other names are not known: what they add is theirs to say.

    state: as the model was built with; by default found in its layers
    """
    if world_of(model, state).size == 1:
        return
    split = {shard.local: name for name, shard in shards_of(model, state).items() if shard.dim is not None}
    for each in optimizer.optimizers if isinstance(optimizer, CombinedOptimizer) else (optimizer,):
        if isinstance(each, Muon) or type(each).__name__ in ELEMENTWISE:
            continue
        names = [split[p] for group in each.param_groups for p in group["params"] if p in split]
        if names:
            kind = type(each).__name__
            why = next((why for word, why in _WHY.items() if word.lower() in kind.lower()), None)
            raise ValueError(
                f"require_elementwise: {kind} has '{names[0]}'"
                + f" and {len(names) - 1} more" * (len(names) > 1)
                + ", of which each rank holds a shard, and "
                + (f"takes the shard for the full parameter: {why}" if why else "is not known here")
                + f". Right on shards are {', '.join(sorted(ELEMENTWISE))}, and tpkernels.optim.Muon"
            )
