"""What `GradientBuckets` asks of parameters, and leaves on them while it lives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tpkernels.comm.supported import Problem

Named = list[tuple[str, nn.Parameter]]


def given_parameters(module_or_named_parameters: object) -> tuple[Named, Problem | None]:
    """Names and parameters, tied ones once, frozen ones too, and why they cannot be used, if so."""
    if isinstance(module_or_named_parameters, nn.Module):
        pairs: Iterable[object] = module_or_named_parameters.named_parameters()
    elif isinstance(module_or_named_parameters, Iterable):
        pairs = module_or_named_parameters
    else:
        kind = type(module_or_named_parameters).__name__
        return [], ("TypeError", f"expected a module or pairs of name and parameter, got {kind}")
    named: Named = []
    known: set[int] = set()
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], Tensor)):
            return [], ("TypeError", f"expected pairs of name and parameter, got {type(pair).__name__}")
        name, parameter = pair
        if not isinstance(name, str):
            return [], ("TypeError", f"expected a name for each parameter, got {name!r}")
        if not parameter.is_leaf:
            return [], (
                "ValueError",
                f"'{name}' is computed from other tensors; expected a parameter (a leaf)",
            )
        if is_under_buckets(parameter):
            return [], (
                "ValueError",
                f"'{name}' is under other GradientBuckets already; call detach() on these first",
            )
        if id(parameter) not in known:
            known.add(id(parameter))
            named.append((name, parameter))
    name, count = Counter(["", *(name for name, p in named if p.requires_grad)]).most_common(1)[0]
    if count > 1:
        return [], ("ValueError", f"{count} parameters are called '{name}'; names must differ")
    return named, None


def is_under_buckets(parameter: Tensor) -> bool:
    return isinstance(vars(parameter).get("__deepcopy__"), _RefuseCopy)


class _RefuseCopy:
    """Stands in for a parameter's `__deepcopy__`: copies would lack the hooks, and be trained unreduced."""

    def __call__(self, memo: object) -> NoReturn:
        raise RuntimeError(
            "a module under GradientBuckets cannot be copied, for copies would not be reduced; copy it "
            "before, or call detach() on its GradientBuckets"
        )

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # pickled parameters are free


def refuse_copies(parameters: Sequence[nn.Parameter]) -> None:
    """Make `copy.deepcopy` of the parameters raise."""
    for parameter in parameters:
        parameter.__deepcopy__ = _RefuseCopy()  # type: ignore[method-assign]


def release(parameters: Sequence[nn.Parameter], handles: Sequence[RemovableHandle]) -> None:
    """Take back all that was left on the parameters, but for their gradients."""
    for parameter in parameters:
        vars(parameter).pop("__deepcopy__", None)
        vars(parameter).pop("main_grad", None)
        vars(parameter).pop("grad_added_to_main_grad", None)
    for handle in handles:
        handle.remove()


def publish_main_grads(parameters: Sequence[nn.Parameter], views: Sequence[Tensor]) -> None:
    """Megatron's protocol: fused kernels add to `main_grad`, and say so in `grad_added_to_main_grad`."""
    for parameter, view in zip(parameters, views, strict=True):
        parameter.main_grad = view  # type: ignore[attr-defined]
        parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]


def drop_dummies(parameters: Sequence[nn.Parameter]) -> list[RemovableHandle]:
    """Drop the gradient that a fused kernel returns for form's sake. Runs before the engine's hook."""
    return [parameter.register_post_accumulate_grad_hook(_drop_dummy) for parameter in parameters]


def _drop_dummy(parameter: Tensor) -> None:
    if parameter.grad_added_to_main_grad:  # type: ignore[attr-defined]
        if not getattr(parameter, "zero_out_wgrad", False):  # else zeros, and what other uses added to them
            parameter.grad = None
        parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]


def set_grad_dtype(parameters: Sequence[nn.Parameter], dtype: torch.dtype) -> None:
    """Let autograd accumulate in `dtype`."""
    for parameter in parameters:
        parameter.grad = None
        parameter.grad_dtype = dtype
