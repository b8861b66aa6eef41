"""Second derivatives: local ops have them, through torch's own operators; of other ops they are an error.

The error must reach the caller that asks for them, which torch's `once_differentiable` does not ensure: it
cuts the graph, so that `torch.autograd.functional.hessian`, which allows unused inputs, gets zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor

from tpkernels.ops.inputs import Context, apply

R = TypeVar("R")


def first_order(
    op: str | None = None, *, reads_intermediates: bool | None = False
) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Decorate a backward so that its own derivative is an error; without one that costs a single check.

    op: whose backward, for the error; None: `ctx.op`
    reads_intermediates: backward reads what forward computed, which depends on all inputs of forward;
        None: `ctx.reads_intermediates`
    """

    def decorate(backward: Callable[..., R]) -> Callable[..., R]:
        @wraps(backward)
        def run(ctx: Any, *grads: Tensor | None) -> R:
            if not torch.is_grad_enabled() or torch.compiler.is_compiling():  # the usual case; traced once
                return backward(ctx, *grads)
            reads = ctx.reads_intermediates if reads_intermediates is None else reads_intermediates
            return _refusing_more(op or ctx.op, backward, ctx, grads, reads)

        return run

    return decorate


def _refusing_more(
    op: str, backward: Callable[..., R], ctx: Any, grads: Sequence[Tensor | None], reads_intermediates: bool
) -> R:
    """Compute the gradients and connect them to all that they depend on by a node that raises."""
    if any(into is not None for into in (getattr(ctx, "main_grad", None), *getattr(ctx, "main_grads", ()))):
        raise RuntimeError(
            f"{op}: expected no create_graph=True with main_grad, got both: what is added there cannot be "
            "differentiated again; leave out one of them"
        )
    saved = ctx.saved_tensors  # once: checkpointing allows no second look
    parents = [t for t in (*grads, *saved) if t is not None and t.requires_grad]
    if reads_intermediates and not any(t.grad_fn is ctx for t in parents):
        parents += _unsaved_leaves(op, ctx, parents)
    unpacked = SimpleNamespace(**vars(ctx), saved_tensors=saved, needs_input_grad=ctx.needs_input_grad)
    with torch.no_grad():
        results = backward(unpacked, *grads)
    refusing: R = apply(_NoSecondDerivative, op, results, *parents)
    return refusing


def _unsaved_leaves(op: str, ctx: Any, parents: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the leaves among inputs that intermediates depend on and that are not saved."""
    edges = {(parent.grad_fn, parent.output_nr) for parent in parents}
    for node, number in ctx.next_functions:
        if node is None or (node, number) in edges:
            continue
        if not hasattr(node, "variable"):
            raise RuntimeError(
                f"{_message(op)}. This is raised already now because an input that is not saved (a bias, "
                "x with save_gathered or frozen weights, weights of an x without gradient) is no leaf, and "
                "later nothing would be raised for it"
            )
        yield node.variable


def _message(op: str) -> str:
    return (
        f"{op}: expected to be differentiated once, got a second derivative, which it does not have; leave "
        "out create_graph=True, or use torch's own layers between tpkernels' region functions"
    )


class _NoSecondDerivative(torch.autograd.Function):
    """The identity on gradients, whose own backward raises."""

    @staticmethod
    def forward(
        ctx: Context, op: str, results: Sequence[Tensor | None], *parents: Tensor
    ) -> tuple[Tensor | None, ...]:
        ctx.op = op
        return tuple(None if result is None else result.detach() for result in results)

    @staticmethod
    def backward(ctx: Context, *_: Tensor) -> None:
        raise RuntimeError(_message(ctx.op))
