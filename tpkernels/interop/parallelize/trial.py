"""A plan is tried on copies of a model before the model is touched; all ranks raise the same error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tpkernels.interop.parallelize.made_up import made_up_inputs
from tpkernels.interop.parallelize.plan import Plan
from tpkernels.interop.parallelize.probe import Names, graph_of_rank, partial_parameters
from tpkernels.interop.parallelize.sequence import Sharing
from tpkernels.interop.parallelize.swaps import planned
from tpkernels.interop.parallelize.twins import Inputs, aside, call, twin_of
from tpkernels.interop.parallelize.verify import Reference, difference, reference_of
from tpkernels.layers.world import State, TensorWorld
from tpkernels.ops.replicas import agree_on, unlike_first_rank
from tpkernels.runtime.saying import warn

Verify = Inputs | Literal["auto", False]

# A comparison takes 26 bytes for each, gradients of both models included: 3.3 GiB.
VERIFIED_PARAMETERS = 2**27


def require_verify(verify: object) -> None:
    named = verify in ("auto", False) if isinstance(verify, str | bool) else False
    if not named and not isinstance(verify, Tensor | tuple | Mapping):
        raise TypeError(
            "verify: expected example inputs (a tensor, a tuple, or a mapping of arguments by name), 'auto' "
            f"or False, got {verify!r}"
        )


def tried(
    model: nn.Module, plan: Plan, verify: Verify, world: TensorWorld, state: State, *, certain: bool
) -> Names:
    """Names of the parameters whose gradients must be summed. Called by all ranks of the tensor group.

    Raises if the split model computes something else, or if a parameter cannot be judged.

    certain: a plan that is not compared with the unsharded model is taken with a warning; else it is refused
    """
    if world.size == 1:
        return frozenset()
    given = None if isinstance(verify, str | bool) else verify
    if given is not None:
        _require_same(given, world)
    inputs = made_up_inputs(model, world.size) if verify == "auto" else given
    size = sum(tensor.numel() for tensor in [*model.parameters(), *model.buffers()])
    fits = given is not None or size <= VERIFIED_PARAMETERS
    seen: dict[str, bool] | None = None
    partial: Names = frozenset()
    problem: ValueError | None = None
    try:
        if inputs is not None:
            seen = _probed(model, plan, inputs, world, fits)
        if seen is None and given is not None:
            raise ValueError("verify: the unsharded model does not run with these inputs")
        partial = partial_parameters(model, planned(model, plan, world), seen or {})
    except ValueError as error:
        problem = error
    raise_alike(problem, f"partial gradients of {sorted(partial)}", world)
    if verify is False or dist.get_backend(world.group) == "fake":
        return partial
    found: Reference | str  # the same on all ranks
    if inputs is None or seen is None:
        found = "no inputs with which it runs could be made up"
    elif not fits:
        found = f"it has {size} numbers, and a comparison takes 26 bytes for each"
    else:
        found = reference_alike(model, inputs, given is not None, world)
    if isinstance(found, Reference):
        compare(found, plan, partial, world, state)
    elif not certain:
        raise ValueError(
            "plan: expected one, or verify=example inputs: the model brings none, and one by names of layers "
            f"must be compared with the unsharded model, which was not done: {found}"
        )
    else:
        warn(
            f"parallelize: the split model was not compared with the unsharded one: {found}; pass "
            "verify=example inputs, or verify=False",
            stacklevel=4,
        )
    return partial


def _probed(
    model: nn.Module, plan: Plan, inputs: Inputs, world: TensorWorld, fits: bool
) -> dict[str, bool] | None:
    """By name, whether a parameter sees this rank's features only; None if the model does not run."""
    device = device_of(world) if fits else None
    try:
        twin = twin_of(model, device=device)
    except Exception:  # a module that cannot be copied
        return None
    try:
        return graph_of_rank(twin, planned(twin, plan, world), inputs)
    except ValueError:
        try:
            with aside(model):
                call(twin_of(model, device=device), inputs)
        except Exception:
            return None
        raise


def reference_alike(model: nn.Module, inputs: Inputs, required: bool, world: TensorWorld) -> Reference | str:
    """The unsharded model's run, or why there is none: an error if the caller gave the inputs."""
    found: Reference | str
    try:
        found = reference_of(model, inputs, device_of(world))
    except Exception as error:
        found = f"in float64 and float32 it raises {type(error).__name__}: {error}"
    refused = isinstance(found, str) and required
    problem = ValueError(f"verify: the unsharded model cannot be compared with: {found}") if refused else None
    raise_alike(problem, "not compared" if isinstance(found, str) else f"compared in {found.dtype}", world)
    return found


def compare(
    found: Reference,
    plan: Plan,
    partial: Names,
    world: TensorWorld,
    state: State,
    sharing: Sharing | None = None,
) -> None:
    differences: list[str | None] = [None] * world.size
    own = difference(found, plan, partial, world, state, sharing)
    dist.all_gather_object(differences, own, group=world.group)
    subject, advice = (
        ("sequence_parallel", "Parallelize without it") if sharing else ("plan", "Mend the plan")
    )
    for rank, different in enumerate(differences):
        if different is not None:
            raise ValueError(
                f"{subject}: the split model does not do what the unsharded one does: on tensor rank {rank}, "
                f"{different} ({found.tolerance:.0e} is allowed, in {found.dtype}). {advice}; the model "
                "is as it was"
            )


def device_of(world: TensorWorld) -> torch.device:
    """Where a model on the meta device is run."""
    return torch.device("cuda" if dist.get_backend(world.group) == "nccl" else "cpu")


def raise_alike(problem: ValueError | None, found: str, world: TensorWorld) -> None:
    """The problem of the first rank that has one, on all of them; or all must have found the same."""
    if dist.get_backend(world.group) == "fake":
        if problem:
            raise problem
        return
    problems: list[str | None] = [None] * world.size
    dist.all_gather_object(problems, str(problem) if problem else None, group=world.group)
    for text in problems:
        if text is not None:
            raise ValueError(text) from problem
    agree_on(f"parallelize: {found}", (), world.group)


def _require_same(inputs: Inputs, world: TensorWorld) -> None:
    tensors = [x for x in tree_leaves(inputs) if isinstance(x, Tensor)]
    agree_on("parallelize: verify", [(f"input {i}", x) for i, x in enumerate(tensors)], world.group)
    real = [x.detach() for x in tensors if not x.is_meta]
    if real and bool(unlike_first_rank(real, world.group).any()):
        raise ValueError("verify: expected the same inputs on all tensor-parallel ranks, got others")
