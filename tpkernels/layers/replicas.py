"""Sums of partial gradients of replicated parameters, and checks that replicas are equal on all ranks.

Under sequence parallelism a norm's gradient is partial: it covers this rank's tokens only. Such a parameter
is marked `sequence_parallel`, and `finalize_gradients` sums its gradients, once after the (last) backward of
a step. Without this sum replicas drift apart: `clip_grad_norm_` refuses gradients that differ,
`check_replicas` refuses parameters that differ, and `watch.py` checks parameters after some of the steps.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterable, Sequence

import torch.distributed as dist
from torch import Tensor, nn

from tpkernels.layers.attributes import Attributes
from tpkernels.layers.foreign import is_dtensor, is_split_over, local_of, reshard
from tpkernels.layers.world import State, tensor_world
from tpkernels.ops.inputs import unobserved
from tpkernels.ops.replicas import agree_on, sum_over_ranks_, unlike_first_rank

_WRAPPERS = re.compile(r"^((_forward_module|_orig_mod|module)\.)+")  # Fabric, torch.compile, DDP


def require_marks(caller: str, parameters: Iterable[tuple[str, Tensor]]) -> None:
    """Raise if a DTensor has lost its attribute `sequence_parallel`.

    fully_shard makes new parameters: our layers mark theirs again, other modules do not.
    """
    for name, parameter in parameters:
        if is_dtensor(parameter) and "sequence_parallel" not in vars(parameter):
            raise TypeError(
                f"{caller}: expected parameters with the attribute sequence_parallel, got the DTensor "
                f"'{name}' of a module that is not of tpkernels, which has lost its attributes; after "
                "fully_shard, set its attribute sequence_parallel to True or False"
            )


def gradient_of(parameter: Tensor) -> Tensor | None:
    """This rank's local `main_grad` if there is one, else its local `grad`; None without either."""
    main_grad: Tensor | None = getattr(parameter, "main_grad", None)
    gradient = parameter.grad if main_grad is None else main_grad
    if is_dtensor(gradient) and any(placement.is_partial() for placement in gradient.placements):
        raise ValueError(
            f"expected gradients that are summed, got one of {tuple(gradient.shape)} with the placements "
            f"{gradient.placements}; redistribute it to its parameter's placements first"
        )
    return None if gradient is None else local_of(gradient)


def finalize_gradients(module: nn.Module, *, state: State = None) -> None:
    """Sum the gradients of parameters marked `sequence_parallel` over the tensor group, in place.

    Called by all its ranks. `GradientBuckets(..., tensor_parallel_group=...)` does the same; doing it twice
    multiplies by the number of ranks.
    """
    world = tensor_world(state)
    reshard(module)
    require_marks("finalize_gradients", module.named_parameters())
    if world.size == 1:
        return
    with unobserved():
        marked = [
            (name, gradient_of(parameter))
            for name, parameter in module.named_parameters()
            if Attributes.of(parameter).sequence_parallel
        ]
        agree_on("finalize_gradients", marked, world.group)
        sum_over_ranks_([gradient for _, gradient in marked if gradient is not None], world.group)


def check_replicas(module: nn.Module, *, state: State = None) -> None:
    """Raise unless replicated parameters have the same bits on all ranks of the tensor group.

    Called by all its ranks. All raise the same error, which names a parameter and the ranks that differ.
    Each parameter is sent and copied, too slow for every step.
    """
    world = tensor_world(state)
    reshard(module)
    copies = [
        (name, parameter)
        for name, parameter in module.named_parameters()
        if not is_split_over(world.ranks, parameter)
    ]
    if world.size == 1 or not copies:
        return
    held = [(name, local_of(parameter)) for name, parameter in copies]
    agree_on("check_replicas", held, world.group)
    unlike = unlike_first_rank([copy for _, copy in held], world.group)
    wrong = unlike.any(0).nonzero().flatten().tolist()
    if not wrong:
        return
    members = dist.get_process_group_ranks(world.group)
    others = [members[i] for i in unlike[:, wrong[0]].nonzero().flatten().tolist()]
    name, copy = copies[wrong[0]]
    raise drift(copy, name, others, members[0], len(wrong), len(copies))


def drift(
    copy: Tensor, name: str, others: Sequence[int], first: int, wrong: int, total: int, when: str = ""
) -> RuntimeError:
    """Return the error that replicas of a parameter on ranks `others` differ from rank `first`'s."""
    more = f"; so do {wrong - 1} more of {total} parameters" if wrong > 1 else ""
    return RuntimeError(
        f"check_replicas: '{name}' differs between tensor-parallel ranks that hold copies of it. "
        f"{likely_causes(copy)}. Ranks may also have begun with other weights: one seed, one checkpoint; or "
        "clipped by torch's clip_grad_norm_, which takes the norm of one rank's shards: clip by "
        "tpkernels.clip_grad_norm_; or, on GPUs, chosen kernels that differ in the last bit: "
        f"TPKERNELS_TUNE=0. It differs on rank{'s' * (len(others) > 1)} {', '.join(map(str, others))} from "
        f"rank {first}{more}{when}"
    )


def likely_causes(copy: Tensor) -> str:
    """Return why gradients of replicas differ between ranks and what to do, the likeliest cause first."""
    causes = [
        "other data: give each rank the same batch, by a sampler over state.rank_in('dp')",
        "other dropout: seed by tpkernels.manual_seed(seed), alike on all ranks",
        "a sum that is missing: call finalize_gradients(model) after each backward, or give GradientBuckets "
        "the tensor_parallel_group, and mark parameters sequence_parallel whose gradients are of this rank's "
        "tokens",
    ]
    if Attributes.of(copy).sequence_parallel:
        causes.insert(0, causes.pop())
    return f"Likeliest is {causes[0]}; then {causes[1]}; then {causes[2]}"


def name_of(parameter: Tensor) -> str:
    """Find the name of a parameter in an outermost module, without wrappers.

    For errors only: it searches all objects of the process.
    """
    modules = [found for found in gc.get_objects() if issubclass(type(found), nn.Module)]
    inner = {id(child) for module in modules for child in module._modules.values()}
    for module in modules:
        if id(module) not in inner:
            for name, candidate in module.named_parameters():
                if candidate is parameter:
                    return _WRAPPERS.sub("", name)
    return ""
