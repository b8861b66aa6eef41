"""Refuses optimizers that are wrong on shards: they do not update each element by its gradients alone.

Refuses also those of parameters that `parallelize` has replaced. torch calls `before_step` before each step
of each of its optimizers, while there are layers; `check` looks at others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tpkernels.errors import warn
from tpkernels.layers.wrappers import accepted, is_shard, replacer_of

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
    "Muon": "it orthogonalizes the matrix",
    "Shampoo": "its factors are products of the matrix with itself",
    "SOAP": "its factors are products of the matrix with itself",
    r"\dbit": "blocks of elements share a scale, and a shard has other blocks",
}


def before_step(optimizer: Optimizer, _: tuple[Any, ...], __: dict[str, Any]) -> None:
    """torch's hook before a step: look at the optimizer, unless it has been, with as many parameters."""
    if torch.compiler.is_compiling():
        return
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    if accepted.get(optimizer) != count:
        refuse_optimizer(optimizer, [p for group in optimizer.param_groups for p in group["params"]])
        accepted[optimizer] = count


def refuse_optimizer(
    optimizer: object, parameters: Sequence[Tensor], names: Mapping[int, str] | None = None
) -> None:
    """Raise if an optimizer is known to be wrong on its parameters; warn if it is not known.

    names: of some parameters, by id
    """
    for parameter in parameters:
        if replaced := replacer_of(parameter):
            caller, name = replaced
            raise ValueError(
                f"{type(optimizer).__name__}: the optimizer has '{name}', which {caller} has replaced in the "
                f"model; call {caller} first, then build the optimizer"
            )
    shards = [
        (names or {}).get(id(parameter)) or f"a parameter of shape {tuple(parameter.shape)}"
        for parameter in parameters
        if is_shard(parameter)
    ]
    problem = problem_on_shards(optimizer, shards)
    if problem and why_wrong(optimizer):
        raise ValueError(problem)
    if problem and ELEMENTWISE.isdisjoint(kind.__name__ for kind in type(optimizer).__mro__):
        warn(problem, stacklevel=4)


def problem_on_shards(optimizer: object, shards: Sequence[str]) -> str:
    """Why an optimizer is wrong, or not known to be right, on these shards; "" if it is right."""
    kind, module, why = type(optimizer).__name__, type(optimizer).__module__, why_wrong(optimizer)
    if not shards or module.startswith("tpkernels.") or (kind in ELEMENTWISE and not why):
        return ""
    more = f" and {len(shards) - 1} more" * (len(shards) > 1)
    said = "takes the shard for the full parameter" if why else "is not known here"
    return (
        f"{kind} has {shards[0]}{more}, of which each rank holds a shard, and {said}: "
        f"use an elementwise one, such as AdamW, or tpkernels.optim.Muon{f'; {why}' * bool(why)}. Right on "
        f"shards are {', '.join(sorted(ELEMENTWISE))}, and tpkernels.optim.Muon"
    )


def why_wrong(optimizer: object) -> str:
    """Why an optimizer is known to be wrong on shards, by its class name; "" if it is not.

    All of bitsandbytes are: states of its AdamW, too, may have 8 bits.
    """
    kind, module = type(optimizer).__name__, type(optimizer).__module__
    if module.startswith("bitsandbytes"):
        return _WHY[r"\dbit"]
    # whole words: "FusedLAMB", not "LambdaSGD"
    return next((why for word, why in _WHY.items() if re.search(rf"(?i:{word})(?![a-z])", kind)), "")
