"""Gradient accumulation into `main_grad`: the weight's gradient is added there, and autograd gets none.

Megatron's protocol asks for more where a weight has `grad_added_to_main_grad`: that is set to True, and
autograd gets a gradient for form's sake, so that hooks run. It holds zeros if the weight has
`zero_out_wgrad`, else whatever lay in memory; whoever gave the weight that attribute drops it. Under
torch.compile it always holds zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tpkernels.dispatch.steps import Steps


def check_main_grad(op: str, main_grad: Tensor | None, weight: Tensor) -> None:
    """main_grad: of the weight's shape, on its device"""
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
    """The weight as an op is to take it, and its `main_grad`.

    owner: whose weight it is, for the error where there is no `main_grad`
    """
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        raise ValueError(
            f"{owner}: expected weight.main_grad with gradient_accumulation_fusion, a tensor of shape "
            f"{tuple(weight.shape)} that gradients are added to; assign one before the forward, or let "
            "GradientBuckets(..., main_grad=True) do it"
        )
    if hasattr(weight, "grad_added_to_main_grad"):
        weight = _SayItWasAdded.apply(weight)  # type: ignore[no-untyped-call]
    return weight, main_grad


class _SayItWasAdded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.weight = weight
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Tensor:
        if gradient is not None:  # a tracer's stand-in
            assert torch.compiler.is_compiling(), "it was added to main_grad"
            zeros: Tensor = _registered_say_it_was_added(ctx.weight)
            return zeros
        ctx.weight.grad_added_to_main_grad = True
        zeroed = getattr(ctx.weight, "zero_out_wgrad", False)
        return torch.zeros_like(ctx.weight) if zeroed else torch.empty_like(ctx.weight)


@torch.library.custom_op("tpkernels::say_it_was_added", mutates_args=())
def _registered_say_it_was_added(weight: Tensor) -> Tensor:
    """Runs in the compiled backward, which hands over the parameter itself."""
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return torch.zeros_like(weight)  # not garbage: whoever replays a CUDA graph misses the line above


@_registered_say_it_was_added.register_fake
def _(weight: Tensor) -> Tensor:
    return torch.empty_like(weight)


def with_main_grad(operator: Any, save: Callable[..., None], backward: Callable[..., Any]) -> Any:
    """A registered operator as torch.compile calls it where there is a main_grad, which comes last.

    The weight is its second input. main_grad is kept beside what is saved for backward, for another backward
    may add to it meanwhile. No operator of ours changes it: to one that changes two parts of a bucket,
    Inductor hands a copy, which it takes from the wrong place.

    save, backward: as `register_autograd` takes them; if ctx.wide, backward gives dw as it was summed
    """

    class Accumulating(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs_and_main_grad: Any) -> Tensor:
            *inputs, main_grad = inputs_and_main_grad
            output = operator(*inputs)
            save(ctx, tuple(inputs), output)
            ctx.wide, ctx.main_grad = True, main_grad
            result: Tensor = output if isinstance(output, Tensor) else output[0]
            return result

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
            dx, dw, *others = backward(ctx, gradient)
            if dw is not None:
                ctx.main_grad.add_(dw)
            return dx, None, *others, None

    return Accumulating.apply


def sum_for(dy: Tensor, x: Tensor, *, wide: bool) -> Tensor | None:
    """Zeros that dyᵀ x is to be added to, or None where it comes as wide as it is asked for by itself."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return dy.new_zeros(dy.shape[1], x.shape[1], dtype=dtype) if wide and x.dtype != dtype else None


def weight_gradient(steps: Steps, dy: Tensor, x: Tensor, main_grad: Tensor | None) -> Tensor | None:
    """dyᵀ x, or None if it was added to `main_grad`."""
    if main_grad is None:
        return steps.wgrad(dy, x)
    steps.wgrad_accumulate_(main_grad, dy, x)
    return None


class WeightGradient:
    """dyᵀ x, of some tokens after the others: summed in fp32 or wider, and rounded once."""

    def __init__(self, main_grad: Tensor | None) -> None:
        self._main_grad = main_grad
        self._sum: Tensor | None = None  # main_grad itself where that is wide enough

    def add(self, steps: Steps, dy: Tensor, x: Tensor) -> None:
        if self._sum is None:
            wide = torch.promote_types(x.dtype, torch.float32)
            if self._main_grad is not None and self._main_grad.dtype == wide:
                self._sum = self._main_grad
            else:
                self._sum = dy.new_zeros(dy.shape[1], x.shape[1], dtype=wide)
            self._dtype = x.dtype
        steps.wgrad_accumulate_(self._sum, dy, x)

    def get(self) -> Tensor | None:
        """None if it was added to main_grad."""
        assert self._sum is not None, "this rank's own tokens always come, if there are none"
        if self._main_grad is None:
            return self._sum.to(self._dtype)
        if self._sum is not self._main_grad:
            self._main_grad += self._sum
        return None
