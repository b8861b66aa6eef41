"""Functions that torch.compile sees as one operator, and that eager code calls as they are.

An operator of torch's dispatcher returns as many tensors whatever its arguments. These return a list instead,
without the results that were not asked for; `fake`, which gives shapes, says by None which those are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Generic, Literal, ParamSpec, TypeVar, get_origin, get_type_hints

import torch
from torch import Tensor
from torch.autograd import forward_ad

P = ParamSpec("P")
R = TypeVar("R")


class Operator(Generic[P, R]):
    """`run`, or in compiled code the operator `tpkernels::name` that runs it.

    run: tensors, lists of them, numbers and words in; a tensor, or a tuple or list of tensors and None out; no
        result is an input, no input is changed
    fake: the same signature; empty tensors of the same shapes, dtypes and contiguous strides
    """

    def __init__(self, name: str, run: Callable[P, R], fake: Callable[P, R]) -> None:
        self.name, self.run, self.fake = name, run, fake
        definition = torch.library.custom_op(
            f"tpkernels::{name}", _listing(run, run, lambda t: t.contiguous()), mutates_args=()
        )
        definition.register_fake(_listing(fake, run, lambda t: t))
        self.overload: Callable[..., list[Tensor]] = getattr(torch.ops.tpkernels, name).default

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.compiler.is_compiling():
            return self.run(*args, **kwargs)
        if in_forward_mode():  # operators drop tangents without a word
            raise NotImplementedError(
                f"{self.name}: expected no forward-mode derivative (jvp) under torch.compile, got one; use "
                "reverse mode, or torch's own layers"
            )
        shapes: Any = self.fake(*args, **kwargs)
        given = iter(self.overload(*args, **kwargs))
        results: Any
        if isinstance(shapes, Tensor):
            results = next(given)
        else:
            results = type(shapes)([None if shape is None else next(given) for shape in shapes])
        return results  # type: ignore[no-any-return]


def in_forward_mode() -> bool:
    """Whether tensors may carry tangents, which do not show in `requires_grad`."""
    return forward_ad._current_level >= 0


def _listing(
    function: Callable[..., Any], signature: Callable[..., Any], prepared: Callable[[Tensor], Tensor]
) -> Callable[..., list[Tensor]]:
    """`function` as an operator takes it: with types of its schema, and only tensors in a list out."""

    def listed(*args: Any) -> list[Tensor]:
        results = function(*args)
        results = (results,) if isinstance(results, Tensor) else results
        return [prepared(result) for result in results if result is not None]

    hints = get_type_hints(signature)
    parameters = [
        parameter.replace(annotation=_schema_type(hints[name]))
        for name, parameter in inspect.signature(signature).parameters.items()
    ]
    listed.__signature__ = inspect.Signature(parameters, return_annotation=list[Tensor])  # type: ignore[attr-defined]
    return listed


def _schema_type(hint: Any) -> Any:
    """Words are text to a schema, and all sequences are of one kind."""
    if get_origin(hint) is Literal:
        return str
    if hint == list[Tensor]:
        return Sequence[Tensor]
    return hint
