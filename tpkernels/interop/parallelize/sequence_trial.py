"""Sequence parallelism is tried on copies of a model whose plan passed its own trial."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from tpkernels.interop.parallelize.plan import Plan
from tpkernels.interop.parallelize.probe import Names
from tpkernels.interop.parallelize.sequence import Sharing, sharing_of
from tpkernels.interop.parallelize.swaps import planned
from tpkernels.interop.parallelize.trial import (
    Verify,
    compare,
    device_of,
    example_of,
    raise_alike,
    reference_alike,
)
from tpkernels.interop.parallelize.twins import twin_of
from tpkernels.interop.parallelize.verify import Reference
from tpkernels.layers.world import State, TensorWorld


def sharing_tried(
    model: nn.Module, plan: Plan, partial: Names, verify: Verify, world: TensorWorld, state: State
) -> Sharing | None:
    """What shares tokens; None on one rank. Called by all ranks of the tensor group.

    Raises if a module cannot share tokens, or if the model computes something else when they do.

    partial: parameters whose gradients are summed without sequence parallelism, too
    """
    if world.size == 1:
        return None
    example = example_of(model, verify, world, divided=True)
    if example.inputs is None:
        assert example.refusal is not None
        raise example.refusal
    sharing: Sharing | None = None
    problem: ValueError | None = None
    try:
        twin = twin_of(model, device=device_of(world) if example.fits else None)
        sharing = sharing_of(twin, planned(twin, plan, world), example.inputs, partial, world.size)
    except ValueError as error:
        problem = error
    raise_alike(problem, f"{sharing}", world)
    if example.fits and dist.get_backend(world.group) != "fake":
        found = reference_alike(model, example, world)
        if isinstance(found, Reference):
            compare(found, plan, partial, world, state, sharing)
    return sharing
