"""Which optimizers are right on shards: those that update each element by its own gradients alone."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from tpkernels.interop.shards import shards_of, world_of
from tpkernels.layers.world import State
from tpkernels.optim.combined import CombinedOptimizer
from tpkernels.optim.muon import Muon

# By class name: torch's, and names that other packages use for the same mathematics.
ELEMENTWISE = {
    *("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "FusedAdam", "FusedSGD", "Lion", "NAdam"),
    *("RAdam", "RMSprop", "Rprop", "SGD"),
}
_WHY = {
    "Adafactor": "its factors are means over rows and columns, and it scales by the norm of the parameter",
    "LAMB": "it scales by the norms of the parameter and the update",
    "LARS": "it scales by the norms of the parameter and the gradient",
    "LBFGS": "its inner products are over all parameters",
    "Muon": "it orthogonalizes the matrix; use tpkernels.optim.Muon",
    "Shampoo": "its factors are products of the matrix with itself",
    "SOAP": "its factors are products of the matrix with itself",
    "bit": "blocks of elements share a scale, and a shard has other blocks",  # 8bit, 4bit, bitsandbytes
}


def require_elementwise(optimizer: Optimizer, model: nn.Module, *, state: State = None) -> None:
    """Raise if the optimizer would take a shard of a matrix for the full one, or is not known not to.

    Without effect on one tensor-parallel rank, and on optimizers of replicated parameters only. Subclasses of
    known optimizers under other names are not known: what they add is theirs to say.

    state: as the model was built with; by default found in its layers
    """
    if world_of(model, state).size == 1:
        return
    split = {shard.tensor: name for name, shard in shards_of(model, state).items() if shard.dim is not None}
    for each in optimizer.optimizers if isinstance(optimizer, CombinedOptimizer) else (optimizer,):
        kind = type(each).__name__
        quantized = type(each).__module__.startswith("bitsandbytes")  # its AdamW may have states of 8 bits
        if isinstance(each, Muon) or (kind in ELEMENTWISE and not quantized):
            continue
        names = [split[p] for group in each.param_groups for p in group["params"] if p in split]
        if names:
            described = f"{type(each).__module__}.{kind}".lower()
            why = next((why for word, why in _WHY.items() if word.lower() in described), None)
            raise ValueError(
                f"require_elementwise: {kind} has '{names[0]}'"
                + f" and {len(names) - 1} more" * (len(names) > 1)
                + ", of which each rank holds a shard, and "
                + (f"takes the shard for the full parameter: {why}" if why else "is not known here")
                + f". Right on shards are {', '.join(sorted(ELEMENTWISE))}, and tpkernels.optim.Muon"
            )
