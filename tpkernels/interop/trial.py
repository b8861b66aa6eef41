"""A plan is tried on twins of a model before the model is touched; all ranks raise the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tpkernels.interop.plan import Plan
from tpkernels.interop.probe import Names, graph_of_rank, partial_parameters
from tpkernels.interop.swaps import planned
from tpkernels.interop.twins import Inputs, aside, call, cast, dtype_of, made_up_inputs, twin_of
from tpkernels.interop.verify import TOLERANCE, Reference, difference, reference_of
from tpkernels.layers.world import State, TensorWorld
from tpkernels.ops.replicas import agree_on, unlike_first_rank

Verify = Inputs | Literal["auto", False]

# Each takes 16 bytes while models are compared, with its gradient: 2 GiB.
VERIFIED_PARAMETERS = 2**27


def require_verify(verify: object) -> None:
    named = verify in ("auto", False) if isinstance(verify, str | bool) else False
    if not named and not isinstance(verify, Tensor | tuple | Mapping):
        raise TypeError(
            "verify: expected example inputs (a tensor, a tuple, or a mapping of arguments by name), 'auto' "
            f"or False, got {verify!r}"
        )


def tried(model: nn.Module, plan: Plan, verify: Verify, world: TensorWorld, state: State) -> Names:
    """Names of parameters whose gradients are to be summed. Called by all ranks of the tensor group.

    An error tells of a plan with which the model computes something else, and of a parameter that cannot be
    judged.
    """
    if world.size == 1:
        return frozenset()
    given = None if isinstance(verify, str | bool) else verify
    if given is not None:
        _require_same(given, world)
    inputs = made_up_inputs(model, world.size) if verify == "auto" else given
    seen: dict[str, bool] | None = None
    partial: Names = frozenset()
    problem: ValueError | None = None
    try:
        if inputs is not None:
            seen = _probed(model, plan, inputs, world)
        if seen is None and given is not None:
            raise ValueError("verify: the unsharded model does not run with these inputs")
        partial = partial_parameters(model, planned(model, plan, world), seen or {})
    except ValueError as error:
        problem = error
    _raise_alike(problem, f"partial gradients of {sorted(partial)}", world)
    if inputs is None or seen is None or not _verifiable(model, world, given):
        return partial
    reference = _reference(model, inputs, world, given)
    if reference is not None:
        said: list[str | None] = [None] * world.size
        own = difference(reference, plan, partial, world, state)
        dist.all_gather_object(said, own, group=world.group)
        for rank, found in enumerate(said):
            if found is not None:
                raise ValueError(
                    f"plan: the split model does not do what the unsharded one does: on tensor rank {rank}, "
                    f"{found} ({TOLERANCE:.0e} is allowed, in float64). Mend the plan; the model is as it was"
                )
    return partial


def _probed(model: nn.Module, plan: Plan, inputs: Inputs, world: TensorWorld) -> dict[str, bool] | None:
    """Whether each parameter sees this rank's features only; None where the unsharded model does not run."""
    try:
        twin = twin_of(model)
    except Exception:  # a module that cannot be copied
        return None
    try:
        return graph_of_rank(twin, planned(twin, plan, world), inputs)
    except ValueError:
        try:
            with aside(model):
                call(twin_of(model), cast(inputs, dtype_of(model)))
        except Exception:
            return None
        raise


def _verifiable(model: nn.Module, world: TensorWorld, given: Inputs | None) -> bool:
    tensors = [*model.parameters(), *model.buffers()]
    if any(tensor.is_meta for tensor in tensors) or dist.get_backend(world.group) == "fake":
        return False
    return given is not None or sum(tensor.numel() for tensor in tensors) <= VERIFIED_PARAMETERS


def _reference(
    model: nn.Module, inputs: Inputs, world: TensorWorld, given: Inputs | None
) -> Reference | None:
    """None where the unsharded model does not run in float64, and nobody asked for it."""
    reference: Reference | None = None
    problem: ValueError | None = None
    try:
        reference = reference_of(model, inputs)
    except Exception as error:
        if given is not None:
            problem = ValueError(
                "verify: the unsharded model does not run with these inputs in float64: "
                f"{type(error).__name__}: {error}"
            )
    _raise_alike(problem, f"compared: {reference is not None}", world)
    return reference


def _raise_alike(problem: ValueError | None, found: str, world: TensorWorld) -> None:
    agree_on(f"parallelize: {problem or found}", (), world.group)
    if problem:
        raise problem


def _require_same(inputs: Inputs, world: TensorWorld) -> None:
    tensors = [x for x in tree_leaves(inputs) if isinstance(x, Tensor)]
    agree_on("parallelize: verify", [(f"input {i}", x) for i, x in enumerate(tensors)], world.group)
    real = [x.detach() for x in tensors if not x.is_meta]
    if real and bool(unlike_first_rank(real, world.group).any()):
        raise ValueError("verify: expected the same inputs on all tensor-parallel ranks, got others")
