"""Gradient accumulation into `main_grad`: the weight's gradient is added there, and autograd gets none.

In Megatron's protocol a weight may have `grad_added_to_main_grad`: it is set to True, and autograd gets a
dummy gradient, so that hooks run. It holds zeros if the weight has `zero_out_wgrad`, else uninitialized
memory, which the owner of the attribute drops. Under
torch.compile it always holds zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tpkernels.dispatch import primitives
from tpkernels.dispatch.operators import define
from tpkernels.dispatch.products import sums_dtype
from tpkernels.ops.inputs import Context, apply

# What a weight's gradient is added to. None or False: to nothing, autograd gets it in the weight's dtype.
# True: in an operator under torch.compile, which returns it in fp32 or wider for `add_if_traced`.
Into = Tensor | bool | None


def flags_if_traced(main_grads: Sequence[Tensor | None]) -> Sequence[Into]:
    """Return the main_grads; under torch.compile whether they are there, as operators may not change them."""
    if not torch.compiler.is_compiling():
        return main_grads
    return [into is not None for into in main_grads]


def check_main_grad(op: str, main_grad: Tensor | None, weight: Tensor) -> None:
    """Raise unless main_grad has the weight's shape and device, and requires no gradient."""
    if main_grad is None:
        return
    if main_grad.shape != weight.shape or main_grad.device != weight.device:
        raise ValueError(
            f"{op}: expected main_grad {tuple(weight.shape)} on {weight.device} like the weight, got "
            f"{tuple(main_grad.shape)} on {main_grad.device}"
        )
    if main_grad.requires_grad:
        raise ValueError(f"{op}: expected a main_grad that requires no gradient itself; detach it")


def accumulating(weight: Tensor, owner: str) -> tuple[Tensor, Tensor]:
    """Return the weight to pass to an op, which marks it in backward, and its `main_grad`.

    owner: the layer, for the error if there is no `main_grad`
    """
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        raise ValueError(
            f"{owner}: expected weight.main_grad with gradient_accumulation_fusion, got none; let "
            "GradientBuckets(..., main_grad=True) make it, or assign a tensor of shape "
            f"{tuple(weight.shape)}, to which gradients are added, before the forward"
        )
    if hasattr(weight, "grad_added_to_main_grad"):
        weight = apply(_SayItWasAdded, weight)
    return weight, main_grad


class _SayItWasAdded(torch.autograd.Function):
    """The identity on a weight; backward marks it as added to `main_grad`, and returns a dummy gradient."""

    @staticmethod
    def forward(ctx: Context, weight: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.weight, ctx.main_grad = weight, weight.main_grad  # type: ignore[attr-defined]
        return weight.view_as(weight)

    @staticmethod
    def spmd_typecheck(*, weight: Tensor) -> Any:
        return weight

    @staticmethod
    def backward(ctx: Context, gradient: Tensor | None) -> Tensor:
        weight: Tensor = ctx.weight
        if gradient is not None:  # a tracer's stand-in
            assert torch.compiler.is_compiling(), "it was added to main_grad"
            zeros: Tensor = _zeros_for_marked(weight)
            return zeros
        if getattr(weight, "main_grad", None) is not ctx.main_grad:
            raise RuntimeError(
                "expected the weight's main_grad of forward in backward, got another, or none: the gradient "
                "was added to the former; keep the tensor and zero it in place, or replace it before forward"
            )
        _mark_as_added(weight)
        zeroed = getattr(weight, "zero_out_wgrad", False)
        return torch.zeros_like(weight) if zeroed else torch.empty_like(weight)


def asked_for(
    ctx: Context, main_grads: Sequence[Tensor | None], needs: Sequence[bool], first: int
) -> Sequence[bool]:
    """Return which weights' gradients this backward is to compute.

    `autograd.grad(loss, x)` and `backward(inputs=[x])` leave weights out, and so their `main_grad`. Compiled
    code computes all gradients in one graph, and does not know.

    needs: of the weights, of `ctx.needs_input_grad`
    first: place of the first weight among the tensors of forward
    """
    for into in main_grads:
        if into is not None:
            break
    else:  # without the frames of `any`
        return needs
    if torch.compiler.is_compiling():
        return needs
    nodes = [ctx.next_functions[first + i][0] for i in range(len(main_grads))]
    for node, into in zip(nodes, main_grads, strict=True):
        marks = into is not None and getattr(node, "_forward_cls", None) is _SayItWasAdded
        if marks and _engine_runs(node.next_functions[0][0]) is None:
            raise RuntimeError(
                "expected backward() of a weight with grad_added_to_main_grad, got torch.autograd.grad of "
                "it, which would return a dummy: its gradient is in main_grad"
            )
    return [
        need and (into is None or _engine_runs(node) is not False)
        for node, need, into in zip(nodes, needs, main_grads, strict=True)
    ]


def _engine_runs(node: Any) -> bool | None:
    """Whether the backward that runs now gets to this node; None if `autograd.grad` returns what it gets."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch does not say this of a leaf that is asked for
        return None


def _mark_as_added(weight: Tensor) -> None:
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]


def _zeros_once_marked(weight: Tensor) -> Tensor:
    """Mark the weight and return zeros; runs in the compiled backward, with the parameter itself."""
    _mark_as_added(weight)
    return torch.zeros_like(weight)  # not garbage: a CUDA graph that is replayed does not run the line above


_zeros_for_marked = define(
    "say_it_was_added", "(Tensor weight) -> Tensor", _zeros_once_marked, torch.empty_like
)


def empty_weight_gradient(dy: Tensor, x: Tensor, into: Into) -> Tensor:
    """Return an empty tensor like dyᵀ x, with the dtype in which an operator returns it."""
    return x.new_empty(dy.shape[1], x.shape[1], dtype=dtype_of_gradient(x, into))


def dtype_of_gradient(x: Tensor, into: Into) -> torch.dtype:
    """Return the dtype of a weight gradient: that of x for autograd, fp32 or wider for a main_grad."""
    return sums_dtype(x.dtype) if isinstance(into, Tensor) or into else x.dtype


def weight_gradient(dy: Tensor, x: Tensor, into: Into) -> Tensor | None:
    """Compute dyᵀ x and return it, or add it to a main_grad and return None."""
    if isinstance(into, Tensor):
        primitives.wgrad_accumulate_(into, dy, x)
        return None
    if not into or x.dtype == sums_dtype(x.dtype):
        return primitives.wgrad(dy, x)
    summing = WeightGradient(into)
    summing.add(dy, x)
    return summing.get()


class WeightGradient:
    """Accumulates dyᵀ x over chunks of tokens, in fp32 or wider, and rounds the sum once."""

    def __init__(self, into: Into) -> None:
        self._into = into
        self._sum: Tensor | None = None  # main_grad itself where that is wide enough

    def add(self, dy: Tensor, x: Tensor) -> None:
        if self._sum is None:
            dtype = sums_dtype(x.dtype)
            if isinstance(self._into, Tensor) and self._into.dtype == dtype:
                self._sum = self._into
            else:
                self._sum = dy.new_zeros(dy.shape[1], x.shape[1], dtype=dtype)
            self._dtype = x.dtype
        primitives.wgrad_accumulate_(self._sum, dy, x)

    def get(self) -> Tensor | None:
        """Return the sum, or None if it was added to a main_grad."""
        assert self._sum is not None, "this rank's own tokens always come, if there are none"
        if not isinstance(self._into, Tensor):
            return self._sum if self._into else self._sum.to(self._dtype)
        if self._sum is not self._into:
            self._into += self._sum
        return None


def add_if_traced(
    main_grads: Sequence[Tensor | None], gradients: Sequence[Tensor | None]
) -> Sequence[Tensor | None]:
    """Return the weight gradients for autograd; under torch.compile add those of main_grads first.

    Eagerly the op has added them already. Under torch.compile it is done here, since no operator may
    change a main_grad: to one that changes two parts of a bucket, Inductor hands a copy, which it takes from
    the wrong place. A main_grad is kept in the autograd function's ctx, not saved for backward, for
    another backward may add to it meanwhile.
    """
    if not torch.compiler.is_compiling():
        return gradients
    for into, gradient in zip(main_grads, gradients, strict=True):
        if into is not None and gradient is not None:
            into.add_(gradient)
    return [gradient if into is None else None for into, gradient in zip(main_grads, gradients, strict=True)]
