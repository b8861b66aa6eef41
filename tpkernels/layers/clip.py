"""Clipping by the norm of the full model's gradients.

tensor ranks      shards are counted on every rank, replicated parameters once
pipeline stages   their squares are added; parameters with Megatron's attribute `shared`, the last stage's
                  replica of the embedding, are not counted
data ranks        have the same gradients: nothing is added; blocks under `fully_shard` are added; experts
                  that are spread over them are refused

With TP-invariance the norm is added exactly: the bits of `exact_norm` depend neither on the order of elements
nor on their sharding. Elements are scaled by a power of two, so that the largest lies in [1/2, 1). Their
squares in float64, exact for fp32 and narrower, are cut into limbs of 22 bits. Limbs are whole numbers, whose
sums are exact in any order. What lies below the last limb, 2**-88, is dropped: for 2**40 elements less than
2**-46 of the sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tpkernels import tp_invariance
from tpkernels.groups.state import ParallelState, current
from tpkernels.layers.attributes import Attributes
from tpkernels.layers.replicas import gradient_of, likely_causes
from tpkernels.layers.world import State, tensor_world
from tpkernels.layers.wrappers import groups_with_blocks, is_dtensor, ranks_of
from tpkernels.ops.inputs import unobserved
from tpkernels.ops.replicas import agree_on, from_all_ranks

LIMBS = 4
LIMB_BITS = 22  # sums of 2**41 limbs fit into an int64
CHUNK = 2**24  # elements: a chunk's sums fit into the 53 bits of a float64
CHUNK_ON_CPU = 2**16  # its copies fit into a cache, too
LEAST_EXPONENT = -1023  # below, 2.0**-exponent is no float64; only subnormals of float64 are so small


@torch.no_grad()
def exact_norm(tensors: Sequence[Tensor], device: torch.device, groups: Sequence[ProcessGroup]) -> float:
    """Return the norm of all ranks' elements, summed over the first group, then over the second, ...

    Called by all ranks of the groups, with different elements. Infinity or NaN among them is returned.
    """
    largest = _largest(tensors, device)
    for group in groups:
        largest = from_all_ranks(largest, group).amax(0)
    top = largest.item()
    if top == 0 or not math.isfinite(top):
        return top
    exponent = max(math.frexp(top)[1], LEAST_EXPONENT)
    limbs = _limbs(tensors, device, 2.0**-exponent)
    for group in groups:
        limbs = from_all_ranks(limbs, group).sum(0)
    total = 0
    for limb in limbs.tolist():
        total = (total << LIMB_BITS) + limb
    try:
        return math.ldexp(math.sqrt(total), exponent - LIMBS * LIMB_BITS // 2)
    except OverflowError:  # of float64 gradients
        return math.inf


def _largest(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """The largest magnitude, or NaN: (1,) in float64."""
    found = [tensor.abs().amax().double() for tensor in tensors if tensor.numel()]
    return torch.stack(found).amax()[None] if found else torch.zeros(1, dtype=torch.float64, device=device)


def _limbs(tensors: Sequence[Tensor], device: torch.device, scale: float) -> Tensor:
    """Sums of the limbs of squares: (LIMBS,) in int64, the highest first."""
    sums = torch.zeros(LIMBS, dtype=torch.int64, device=device)
    for chunk in _chunks(tensors):
        rest = chunk.double().mul(scale).square_()  # below 1; `double` of a float64 is no copy
        for limb in range(LIMBS):
            rest.mul_(2.0**LIMB_BITS)
            whole = rest.floor()
            rest.sub_(whole)
            sums[limb] += whole.sum().long()
    return sums


def _chunks(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    for tensor in tensors:
        yield from tensor.reshape(-1).split(CHUNK_ON_CPU if tensor.device.type == "cpu" else CHUNK)


# Relative to a gradient's norm: rounding and atomic additions cause less, gradients of other tokens far more.
_TOLERANCE = 0.01


@torch.no_grad()
def clip_grad_norm_(parameters: Iterable[Tensor] | Tensor, max_norm: float, *, state: State = None) -> Tensor:
    """Scale gradients so that their norm over the full model is at most max_norm; return the norm before.

    parameters: all parameters of this rank; `main_grad` is used before `grad`
    state: with a process group or a mesh there are no pipeline stages

    Called by all ranks of the model. If gradients of a replicated parameter differ between tensor ranks, all
    ranks raise: often `finalize_gradients` was forgotten.
    """
    if not max_norm >= 0:
        raise ValueError(f"clip_grad_norm_: expected max_norm of 0 or more, got {max_norm}")
    owned = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    owned = list({id(parameter): parameter for parameter in owned}.values())  # tied parameters once
    for n, parameter in enumerate(owned):
        if not Attributes.of(parameter).allreduce:
            raise ValueError(
                "clip_grad_norm_: expected no parameter of an expert (allreduce=False), got parameter "
                f"{n} of those given, {tuple(parameter.shape)}: data-parallel ranks hold other experts, and "
                "each would scale by a norm of its own; add squares of experts over the group 'ep' yourself"
            )
    with unobserved():
        return _clipped(owned, max_norm, state)


def _clipped(owned: Sequence[Tensor], max_norm: float, state: State) -> Tensor:
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
    if tp_invariance.default.segments:
        added = {ranks_of(groups[0]): groups[0]}
        for parameter in owned:
            added |= _block_groups(parameter, groups[0])
        counted = [gradient_of(p) for p in owned if _counts_here(p, groups[0], added)]
        there = [gradient for gradient in counted if gradient is not None]
        norm.fill_(exact_norm(there, device, [*added.values(), *groups[1:]]))
    gradients = [gradient for gradient in map(gradient_of, owned) if gradient is not None]
    if gradients:
        torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm.float()


def _square_over_tensor_ranks(
    parameters: Sequence[Tensor], group: ProcessGroup, device: torch.device
) -> tuple[Tensor, Exception | None]:
    """Return the gradients' sum of squares, replicas counted once, same bits on all ranks; or an error."""
    counted = {n: p for n, p in enumerate(parameters) if not getattr(p, "shared", False)}
    split = {n: p for n, p in counted.items() if Attributes.of(p).tensor_model_parallel}
    copied = {n: p for n, p in counted.items() if n not in split}
    ordered = [*split.values(), *copied.values()]
    gradients = [gradient_of(parameter) for parameter in ordered]
    claims = zip(copied.items(), gradients[len(split) :], strict=True)
    named = [  # blocks of a DTensor may differ in shape: ranks compare the DTensor itself
        (f"parameter {n} of those given", p if gradient is not None and is_dtensor(p) else gradient)
        for (n, p), gradient in claims
    ]
    problem: Exception | None = None
    try:
        if group.size() > 1:
            agree_on("clip_grad_norm_", named, group)  # so that all ranks send equally many numbers
    except (RuntimeError, TypeError, ValueError) as error:
        problem = error
    numbers = [_square_and_sum(gradient, device) for gradient in gradients]
    table = torch.stack(numbers, 1) if numbers else torch.zeros(2, 0, dtype=torch.float64, device=device)
    _add_blocks_(table, ordered, group)
    if problem is not None:
        return table.new_zeros(()), problem
    squares, sums = table[:, len(split) :]
    everybody = from_all_ranks(torch.cat([table[0, : len(split)].sum()[None], squares.sqrt(), sums]), group)
    square = everybody[:, 0].sum() + everybody[0, 1 : 1 + len(copied)].square().sum()
    return square, _difference(copied, everybody[:, 1:].unflatten(1, (2, len(copied))), group)


def _square_and_sum(gradient: Tensor | None, device: torch.device) -> Tensor:
    """Sum the squares and the elements of this rank's gradient: (2,)."""
    if gradient is None:
        return torch.zeros(2, dtype=torch.float64, device=device)
    norm = torch.linalg.vector_norm(gradient, dtype=torch.promote_types(gradient.dtype, torch.float32))
    return torch.stack([norm.double().square(), gradient.sum(dtype=torch.float64)])


def _add_blocks_(table: Tensor, parameters: Sequence[Tensor], group: ProcessGroup) -> None:
    """Sum, in place, the columns of gradients whose tensor-parallel shard is split into blocks over ranks.

    table: (2, parameters)
    """
    columns: dict[tuple[int, ...], tuple[ProcessGroup, list[int]]] = {}
    for column, parameter in enumerate(parameters):
        for ranks, holders in _block_groups(parameter, group).items():
            columns.setdefault(ranks, (holders, []))[1].append(column)
    for holders, which in columns.values():
        table[:, which] = from_all_ranks(table[:, which].flatten(), holders).sum(0).view(2, len(which))


def _block_groups(parameter: Tensor, group: ProcessGroup) -> dict[tuple[int, ...], ProcessGroup]:
    """The groups, by ranks, that hold blocks of a parameter's tensor-parallel shard, or of a replica.

    group: the tensor-parallel group, whose ranks hold shards of a DTensor of the full shape, not blocks
    """
    found = groups_with_blocks(parameter)
    if Attributes.of(parameter).tensor_model_parallel:
        found.pop(ranks_of(group), None)
    return found


def _square_over_stages(
    square: Tensor, problem: Exception | None, group: ProcessGroup
) -> tuple[Tensor, Exception | None]:
    """Return the sum over pipeline stages, or the error of any stage, so that all stages raise."""
    refused = torch.full_like(square, problem is not None)
    squares, refusals = from_all_ranks(torch.stack([square, refused]), group).unbind(1)
    stages = refusals.nonzero().flatten().tolist()
    if stages and problem is None:
        problem = RuntimeError(
            f"clip_grad_norm_: refused on pipeline stage {stages[0]}, whose ranks say why; nothing is clipped"
        )
    return squares.sum(), problem


def _counts_here(
    parameter: Tensor, group: ProcessGroup, added: Mapping[tuple[int, ...], ProcessGroup]
) -> bool:
    """Whether this rank counts its gradient: where ranks hold the same gradient, only the first counts it.

    group: the tensor-parallel group
    added: the groups over which gradients are added, by their ranks
    """
    if getattr(parameter, "shared", False):
        return False
    parts = {*_block_groups(parameter, group)}
    if Attributes.of(parameter).tensor_model_parallel:
        parts.add(ranks_of(group))
    return all(ranks in parts or each.rank() == 0 for ranks, each in added.items())


def _difference(copies: Mapping[int, Tensor], numbers: Tensor, group: ProcessGroup) -> Exception | None:
    """Make the error if gradients of replicas differ between ranks; None if they do not.

    copies: by their numbers among the given parameters
    numbers: (ranks, 2, gradients): norm and sum of each, which identify a gradient well enough
    """
    first = numbers[0]
    alike = (numbers - first).abs() <= _TOLERANCE * first[0]
    alike |= (numbers == first) | (numbers.isnan() & first.isnan())
    wrong = (~alike).any(0).any(0).nonzero().flatten().tolist()
    if not wrong:
        return None
    found = "; ".join(
        f"rank {rank} has norm {norm:.6g} and sum {total:.6g}"
        for rank, (norm, total) in zip(ranks_of(group), numbers[:, :, wrong[0]].tolist(), strict=True)
    )
    more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    number, copy = list(copies.items())[wrong[0]]
    name = f"parameter {number} of those given, {tuple(copy.shape)}"
    return RuntimeError(
        f"clip_grad_norm_: tensor-parallel ranks hold copies of {name}{more}, but different gradients. "
        f"{likely_causes(copy)}. {found}"
    )
