"""Clipping by the norm of the full model's gradients.

tensor ranks      shards are counted on every rank, replicated parameters once
pipeline stages   their norms are added; parameters with Megatron's attribute `shared`, the last stage's
                  replica of the embedding, are not counted
data ranks        have the same gradients: nothing is added

With TP-invariance the norm that is returned, and clips, is added exactly (`exact_norm`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from tpkernels.layers.attributes import Attributes
from tpkernels.layers.exact_norm import exact_norm
from tpkernels.layers.replicas import gradient_of, refuse_dtensors
from tpkernels.layers.world import State, tensor_world
from tpkernels.ops.replicas import agree_on, from_all_ranks
from tpkernels.runtime.state import ParallelState, current
from tpkernels.tp_invariance import mode

# Relative to a gradient's norm: rounding and atomic additions cause less, gradients of other tokens far more.
_TOLERANCE = 0.01


@torch.no_grad()
def clip_grad_norm_(parameters: Iterable[Tensor] | Tensor, max_norm: float, *, state: State = None) -> Tensor:
    """Scale gradients so that their norm over the full model is at most max_norm; returns the norm before.

    parameters: all of this rank's; called by all ranks of the model. `main_grad` is used before `grad`
    state: with a process group or a mesh there are no pipeline stages

    If gradients of a replicated parameter differ between tensor ranks, all ranks raise: `finalize_gradients`
    was forgotten.
    """
    if not max_norm >= 0:
        raise ValueError(f"clip_grad_norm_: expected max_norm of 0 or more, got {max_norm}")
    owned = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    owned = list({id(parameter): parameter for parameter in owned}.values())  # tied ones once
    refuse_dtensors("clip_grad_norm_", ((f"number {n}", p) for n, p in enumerate(owned)))
    device = owned[0].device if owned else torch.device("cpu")
    found = current() if state is None else state
    groups = [tensor_world(state).group]
    square, problem = _square_over_tensor_ranks(owned, groups[0], device)
    if isinstance(found, ParallelState) and found.size("pp") > 1:
        groups.append(found.process_group("pp"))
        square, problem = _square_over_stages(square, problem, groups[1])
    if problem is not None:
        raise problem
    norm = square.sqrt()
    if mode.fix("clip_grad_norm_"):
        norm.fill_(exact_norm(_counted(owned, groups[0]), device, groups))
    gradients = [gradient for gradient in map(gradient_of, owned) if gradient is not None]
    if gradients:
        torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm.float()


def _square_over_tensor_ranks(
    parameters: Sequence[Tensor], group: ProcessGroup, device: torch.device
) -> tuple[Tensor, Exception | None]:
    """The sum of squares of gradients, replicas once, with the same bits on all ranks; or an error."""
    split: list[Tensor] = []
    copies: list[tuple[str, Tensor | None]] = []
    for number, parameter in enumerate(parameters):
        gradient = gradient_of(parameter)
        if getattr(parameter, "shared", False):
            continue
        if not Attributes.of(parameter).tensor_model_parallel:
            copies.append((f"parameter {number} of those given", gradient))
        elif gradient is not None:
            split.append(gradient)
    try:
        if group.size() > 1:
            agree_on("clip_grad_norm_", copies, group)  # so that all ranks bring as many numbers
    except (RuntimeError, TypeError, ValueError) as error:
        return torch.zeros((), dtype=torch.float64, device=device), error
    names = [name for name, gradient in copies if gradient is not None]
    copied = [gradient for _, gradient in copies if gradient is not None]
    own = _stacked([_norm(gradient) for gradient in split], device).square().sum()
    norms = _stacked([_norm(gradient) for gradient in copied], device)
    sums = _stacked([gradient.sum(dtype=torch.float64) for gradient in copied], device)
    everybody = from_all_ranks(torch.cat([own[None], norms, sums]), group)
    square = everybody[:, 0].sum() + everybody[0, 1 : 1 + len(names)].square().sum()
    return square, _difference(names, everybody[:, 1:].unflatten(1, (2, len(names))), group)


def _square_over_stages(
    square: Tensor, problem: Exception | None, group: ProcessGroup
) -> tuple[Tensor, Exception | None]:
    """The sum over pipeline stages; or an error of this stage or another, so that all stages raise."""
    refused = torch.full_like(square, problem is not None)
    squares, refusals = from_all_ranks(torch.stack([square, refused]), group).unbind(1)
    stages = refusals.nonzero().flatten().tolist()
    if stages and problem is None:
        problem = RuntimeError(
            f"clip_grad_norm_: refused on pipeline stage {stages[0]}, whose ranks say why; nothing is clipped"
        )
    return squares.sum(), problem


def _counted(parameters: Sequence[Tensor], group: ProcessGroup) -> list[Tensor]:
    """The gradients that this rank adds to the norm of all: of replicated parameters only the first rank."""
    counted = [p for p in parameters if Attributes.of(p).tensor_model_parallel or group.rank() == 0]
    found = (gradient_of(p) for p in counted if not getattr(p, "shared", False))
    return [gradient for gradient in found if gradient is not None]


def _norm(gradient: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(
        gradient, dtype=torch.promote_types(gradient.dtype, torch.float32)
    )
    return norm.double()


def _stacked(numbers: Sequence[Tensor], device: torch.device) -> Tensor:
    return torch.stack(list(numbers)) if numbers else torch.zeros(0, dtype=torch.float64, device=device)


def _difference(names: Sequence[str], numbers: Tensor, group: ProcessGroup) -> Exception | None:
    """numbers: (ranks, 2, gradients): norm and sum of each, which identify a gradient well enough"""
    first = numbers[0]
    alike = (numbers - first).abs() <= _TOLERANCE * first[0]
    alike |= (numbers == first) | (numbers.isnan() & first.isnan())
    wrong = (~alike).any(0).any(0).nonzero().flatten().tolist()
    if not wrong:
        return None
    found = "; ".join(
        f"rank {rank} has norm {norm:.6g} and sum {total:.6g}"
        for rank, (norm, total) in zip(
            dist.get_process_group_ranks(group), numbers[:, :, wrong[0]].tolist(), strict=True
        )
    )
    more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    return RuntimeError(
        f"clip_grad_norm_: tensor-parallel ranks hold copies of {names[wrong[0]]}{more}, but other gradients "
        f"of it: {found}; call finalize_gradients(model) after backward, or give GradientBuckets the "
        "tensor_parallel_group; mark the parameter sequence_parallel if its gradient is of this rank's tokens"
    )
