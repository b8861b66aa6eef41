"""Preparation of an op's inputs: autocast, checks, flattening of leading dimensions into tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, is_autocast_enabled
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from tpkernels.dispatch import backends
from tpkernels.dispatch.operators import in_forward_mode as in_forward_mode
from tpkernels.extension import steps
from tpkernels.kernels import invariance


class Context(Protocol):
    """The ctx of an autograd function, typed; ops set more attributes on it."""

    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[Any, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...
    def set_materialize_grads(self, value: bool) -> None: ...
    def __getattr__(self, name: str) -> Any: ...
    def __setattr__(self, name: str, value: Any) -> None: ...


functorch_is_active = torch._C._are_functorch_transforms_active


def apply(function: type[torch.autograd.Function], *args: object) -> Any:
    """Call `function.apply`; when compiling, with a view of a tensor that is passed twice, to be traced."""
    if not is_compiling():
        return function.apply(*args)
    distinct: list[object] = []
    for arg in args:
        twice = isinstance(arg, Tensor) and any(arg is other for other in distinct)
        distinct.append(arg.view_as(arg) if twice else arg)  # type: ignore[attr-defined]
    return function.apply(*distinct)


# Whether a mode sees each call of torch's, such as a checker's: then an op is one call, gradients or not.
is_observed = torch._C._is_torch_function_mode_enabled
unobserved = torch._C.DisableTorchFunction  # for what ops do beside: a checker of types would misjudge it


def refuse_transforms(op: str) -> NoReturn:
    """Raise inside of torch.func's transforms: rows that ranks send each other have no rule for batches."""
    raise NotImplementedError(
        f"{op}: expected no transform of torch.func (vmap, grad, jvp, ...), for which its autograd function "
        "would need a setup_context; call it on all rows at once, and torch.autograd for gradients"
    )


class _Unrecorded:
    """The ctx of a forward that autograd does not record."""

    needs_input_grad = (False,) * 16

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...
    def set_materialize_grads(self, value: bool) -> None: ...
    def mark_non_differentiable(self, *tensors: Tensor) -> None: ...


def computed(function: type[torch.autograd.Function], *args: object) -> Any:
    """`apply`, or without gradients the forward alone: `apply` takes its time. It may return no input."""
    if (
        torch.is_grad_enabled()
        or is_compiling()
        or in_forward_mode()
        or functorch_is_active()
        or is_observed()
    ):
        return apply(function, *args)
    return function.forward(_Unrecorded(), *args)


def is_torchs(x: Tensor) -> bool:
    """Whether an op on x may be torch's own operators, recorded by torch: autograd functions take their time.

    A kernel has no derivative, and compiled code needs one operator. Forward mode and functorch, which ops
    refuse, go to their autograd functions, whose errors tell of it.
    """
    return (
        x.is_cpu
        and backends.backend in ("auto", "torch")
        and not invariance.batch_invariant  # which `resolve_backend` has a warning for
        and not is_compiling()
        and forward_ad._current_level < 0
        and not functorch_is_active()
    )


@cache
def quick_linear() -> Callable[[Tensor, Tensor, Tensor | None], Tensor | None]:
    """Return the C++ function that computes `F.linear` of matrices of the CPU, or one that returns None.

    It looks at them once, instead of ten times from Python, and returns None if they, or a mode, need more.
    Without the extension it does so always.
    """
    return getattr(steps(), "linear", None) or (lambda x, weight, bias: None)


any_autocast = torch._C._is_any_autocast_enabled


def is_casting(x: Tensor) -> bool:
    """Whether autocast is enabled for the device of x."""
    if not any_autocast():
        return False
    # asking what a device is not takes a fifth of the time of spelling its name
    kind = "cpu" if x.is_cpu else "cuda" if x.is_cuda else x.device.type
    return kind != "meta" and is_autocast_enabled(kind)


def autocast(x: Tensor, *others: Tensor | None) -> Any:
    """Cast (x, *others) to the autocast dtype, as `F.linear` does; float64 stays."""
    dtype = torch.get_autocast_dtype(x.device.type)
    return tuple(t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in (x, *others))


def check_linear(
    op: str, x: Tensor, in_features: int, weight: Tensor, bias: Tensor | None, names: tuple[str, str]
) -> None:
    """Raise unless weight (out_features, in_features) and bias (out_features,) fit x and its device."""
    (weight_name, bias_name), dtype, shape = names, x.dtype, weight.shape
    if len(shape) != 2 or in_features != shape[1]:
        raise ValueError(
            f"{op}: expected x (..., in_features) and {weight_name} (out_features, {in_features}), "
            f"got {tuple(x.shape)} and {tuple(shape)}"
        )
    if bias is not None and bias.shape != shape[:1]:
        raise ValueError(
            f"{op}: expected {bias_name} ({shape[0]},) for {weight_name} {tuple(shape)}, "
            f"got {tuple(bias.shape)}"
        )
    for name, other in ((weight_name, weight), (bias_name, bias)):
        if other is None:
            continue
        if other.dtype is not dtype:
            raise TypeError(
                f"{op}: expected one dtype, got x in {dtype} and {name} in {other.dtype}; "
                "cast one of them, or use torch.autocast"
            )
        # asking tensors whether they are on the CPU is quicker than comparing devices
        if not (x.is_cpu and other.is_cpu) and other.device != x.device:
            raise ValueError(
                f"{op}: expected one device, got x on {x.device} and {name} on {other.device}; move one"
            )
    if not dtype.is_floating_point:
        raise TypeError(f"{op}: expected floating-point tensors, got {dtype}")


def features_of(op: str, x: Tensor) -> int:
    """Return the size of the last dimension of x; raise if it has none."""
    shape = x.shape
    if not shape:
        raise ValueError(f"{op}: expected x (..., in_features), got a tensor without dimensions")
    return shape[-1]


def tokens_of(x: Tensor) -> Tensor:
    """Flatten (..., features) to (tokens, features); a matrix is returned as it is."""
    return x if x.ndim == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def like_tokens(y: Tensor, x: Tensor) -> Tensor:
    """Give (tokens, features) the leading dimensions of x."""
    return y if x.ndim == 2 else y.view(*x.shape[:-1], y.shape[1])


def as_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `tensor.to(dtype)`, without a dispatch if the dtype is right already."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def any_requires_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd records an op on these tensors, forward mode aside."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False
