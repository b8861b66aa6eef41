"""How types of tensors go through ops over a group, for the checker of the package `spmd_types`.

    R   replicated; each rank's gradient is a term of its own     P   a term of a sum over the ranks
    I   replicated ("invariant"), with the full gradient          V   this rank's own: a shard

An autograd function has its rule next to its forward: a static method `spmd_typecheck`, which the checker
calls after the forward. A rule is composed of the steps below. Each says what is moved in forward and in
backward: rows that are gathered in forward and whose gradients are reduce-scattered go from V to R.

spmd_types is imported when a rule runs: who calls it has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch.distributed import ProcessGroup

if TYPE_CHECKING:
    from tpkernels.comm.tensor_parallel import TensorParallel

Typed = Any  # a tensor, or what spmd_types has in its place: a number of dimensions and a type


def einsum(equation: str, *operands: Typed | None, linear_in: Sequence[int] = ()) -> Typed:
    """The type of a local computation; operands that are None are left out of the equation."""
    from spmd_types import rules

    taken, given = equation.split("->")
    terms = [term for term, operand in zip(taken.split(","), operands, strict=True) if operand is not None]
    there = [operand for operand in operands if operand is not None]
    return rules.einsum(f"{','.join(terms)}->{given}", *there, linear_in=linear_in)


def split(x: Typed, group: ProcessGroup | None, dim: int) -> Typed:
    """x; each rank must have its shard of a dimension."""
    from spmd_types import S, rules

    return x if x is None or group is None else rules.convert(x, group, src=S(dim), dst=S(dim))


def full(x: Typed, group: ProcessGroup | None) -> Typed:
    """x as ops take it in that sum its gradient over the ranks; it must be the same on all."""
    from spmd_types import I, R, rules

    return x if x is None or group is None else rules.convert(x, group, src=I, dst=R)


def gathered(x: Typed, group: ProcessGroup | None, sequence_parallel: bool) -> Typed:
    """The tokens that a column layer multiplies: gathered from all ranks, or there already."""
    from spmd_types import R, S, rules

    if group is None or not sequence_parallel:
        return full(x, group)
    return rules.all_gather(x, group, src=S(0), dst=R)


def summed(x: Typed, group: ProcessGroup | None, *, scatter: bool) -> Typed:
    """The sum of all ranks' x; of this rank's tokens if scatter, and gradients are gathered.

    A checker that does not follow which dimensions are split takes a term for a shard: V.
    """
    from spmd_types import I, P, S, V, get_axis_local_type, rules

    if group is None:
        return x
    term = V if group.size() > 1 and get_axis_local_type(x, group) is V else P
    if scatter:
        return rules.reduce_scatter(x, group, src=term, dst=S(0))
    return rules.all_reduce(x, group, src=term, dst=I)


def column(
    x: Typed, weights: Sequence[Typed], biases: Sequence[Typed | None], tp: TensorParallel
) -> list[Typed]:
    """Outputs of column layers that share x, of split or of replicated weights with partial gradients."""
    rows, group = gathered(x, tp.group, tp.sequence_parallel), tp.group
    return [
        einsum("tk,nk,n->tn", rows, _split_or_partial(weight, group), _split_or_partial(bias, group))
        for weight, bias in zip(weights, biases, strict=True)
    ]


def _split_or_partial(x: Typed, group: ProcessGroup | None) -> Typed:
    """A parameter of a column layer. Heads that ranks share are replicated, their gradients summed later."""
    from spmd_types import R, get_axis_local_type

    if x is None or group is None or group.size() == 1 or get_axis_local_type(x, group) is R:
        return x
    return split(x, group, 0)


def row(x: Typed, weight: Typed, bias: Typed | None, tp: TensorParallel) -> Typed:
    """The output of a row layer, which adds the bias after the sum over ranks."""
    group, scatter = tp.group, tp.sequence_parallel
    y = einsum("tk,nk->tn", split(x, group, 1), split(weight, group, 1))
    y = summed(y, group, scatter=scatter)
    return einsum("tn,n->tn", y, full(bias, group) if scatter else bias)


def normed(
    y: Typed, residual: Typed | None, weight: Typed, bias: Typed | None, tp: TensorParallel
) -> Typed | tuple[Typed, Typed]:
    """y, or with a residual their sum and its norm; with TP-invariance gradients are summed over ranks."""
    if residual is None:
        return y
    group = tp.group if tp.segments and tp.sequence_parallel else None
    h = einsum("tn,tn->tn", y, residual)
    return h, einsum("t_,_,_->t_", h, full(weight, group), full(bias, group))


def losses(logits: Typed, target: Typed, class_weight: Typed | None, group: ProcessGroup | None) -> Typed:
    """The loss of each target, (tokens,) or (tokens, n), which all ranks have alike."""
    targets = "tn"[: target.ndim]
    if class_weight is not None:  # of all ids: a token has one of them
        target = einsum("t,c->t", full(target, group), full(class_weight, group))
    else:
        target = full(target, group)
    terms = einsum(f"tv,{targets}->{targets}", split(logits, group, 1), target)
    return summed(terms, group, scatter=False)


def head_losses(
    hidden: Typed,
    weight: Typed,
    bias: Typed | None,
    target: Typed,
    class_weight: Typed | None,
    tp: TensorParallel,
) -> Typed:
    """The loss of each token, of logits that a column layer computes."""
    rows, group = gathered(hidden, tp.group, tp.sequence_parallel), tp.group
    logits = einsum("tk,vk,v->tv", rows, split(weight, group, 0), split(bias, group, 0))
    return losses(logits, target, class_weight, tp.group)


def moved(x: Typed, tp: TensorParallel, forward: str, backward: str) -> Typed:
    """What a region gives, by what it moves in forward and in backward."""
    from spmd_types import I, R, S, rules

    group, features = tp.group, S(x.ndim - 1)
    assert group is not None, "a region has a group"
    match forward, backward:
        case "keep", "sum":
            return rules.convert(x, group, src=I, dst=R)
        case "sum", "keep":
            return summed(x, group, scatter=False)
        case "our_features", "all_features":
            return rules.convert(x, group, src=I, dst=features)
        case "all_features", "our_features":
            return rules.all_gather(x, group, src=features, dst=I)
        case "our_tokens", "all_tokens":
            return rules.convert(x, group, src=I, dst=S(0))
        case "all_tokens", "sum_of_tokens":
            return rules.all_gather(x, group, src=S(0), dst=R)
        case "all_tokens", "our_tokens":
            return rules.all_gather(x, group, src=S(0), dst=I)
        case "sum_of_tokens", "all_tokens":
            return summed(x, group, scatter=True)
        case _:
            raise NotImplementedError(f"a region of {forward} with the gradient {backward} has no type")


def ignore(*tensors: Typed) -> None:
    """Tensors on which the result of forward does not depend."""
    from spmd_types import rules

    rules.ignore(*tensors)
