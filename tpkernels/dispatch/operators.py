"""Functions that torch.compile sees as one operator, and that eager code calls as they are.

An operator of torch's dispatcher returns as many tensors whatever its arguments. These return a list instead,
without the results that were not asked for; `fake`, which gives shapes, says by None which those are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import (
    Annotated,
    Any,
    Generic,
    Literal,
    ParamSpec,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import torch
from torch import Tensor
from torch.autograd import forward_ad

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Packed:
    """In `Annotated[T, Packed(...)]`: an argument that goes through torch's dispatcher as something simpler.

    schema: as what; pack: of a T; unpack: what `run` and `fake` are given there
    """

    schema: Any
    pack: Callable[[Any], Any]
    unpack: Callable[[Any], Any]


class Operator(Generic[P, R]):
    """`run`, or in compiled code the operator `tpkernels::name` that runs it.

    run: tensors, lists of them, numbers, words and named tuples of these in; a tensor, or a tuple or list of
        tensors and None out; no result is an input, no input is changed
    fake: of the same arguments; empty tensors of the same shapes, dtypes and contiguous strides
    """

    def __init__(self, name: str, run: Callable[P, R], fake: Callable[..., R]) -> None:
        self.name, self.run, self.fake = name, run, fake
        hints = get_type_hints(run, include_extras=True)
        self._parameters = [_parameter(word, hint) for word, hint in hints.items() if word != "return"]
        definition = torch.library.custom_op(
            f"tpkernels::{name}", _listing(run, self._parameters, lambda t: t.contiguous()), mutates_args=()
        )
        definition.register_fake(_listing(fake, self._parameters, lambda t: t))
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
        given = iter(self.overload(*self.packed(*args), **kwargs))
        results: Any
        if isinstance(shapes, Tensor):
            results = next(given)
        else:
            results = type(shapes)([None if shape is None else next(given) for shape in shapes])
        return results  # type: ignore[no-any-return]

    def packed(self, *args: Any) -> list[Any]:
        """As `overload` takes them."""
        return [part for p, arg in zip(self._parameters, args, strict=False) for part in p.pack(arg)]


def in_forward_mode() -> bool:
    """Whether tensors may carry tangents, which do not show in `requires_grad`."""
    return forward_ad._current_level >= 0


@dataclass(frozen=True)
class _Parameter:
    """Of `run`. schema: name and type of each argument of the operator that it is packed into"""

    schema: list[tuple[str, Any]]
    pack: Callable[[Any], list[Any]]
    unpack: Callable[[Iterator[Any]], Any]


def _parameter(name: str, hint: Any) -> _Parameter:
    if hasattr(hint, "_fields"):  # a named tuple, field by field
        hints = get_type_hints(hint, include_extras=True)
        fields = [_parameter(f"{name}_{field}", hints[field]) for field in hint._fields]
        return _Parameter(
            [entry for field in fields for entry in field.schema],
            lambda values: [part for field, v in zip(fields, values, strict=True) for part in field.pack(v)],
            lambda given: hint(*(field.unpack(given) for field in fields)),
        )
    if get_origin(hint) is Annotated:
        packed: Packed = hint.__metadata__[0]
        return _Parameter(
            [(name, packed.schema)], lambda v: [packed.pack(v)], lambda given: packed.unpack(next(given))
        )
    return _Parameter([(name, _schema_type(hint))], lambda v: [v], next)


def _schema_type(hint: Any) -> Any:
    """Words are text to a schema, and all sequences are of one kind."""
    if get_origin(hint) is Literal:
        return str
    if get_origin(hint) in (Union, UnionType):
        return Union[tuple(_schema_type(choice) for choice in get_args(hint))]  # noqa: UP007
    return Sequence[Tensor] if hint == list[Tensor] else hint


def _listing(
    function: Callable[..., Any], parameters: list[_Parameter], prepared: Callable[[Tensor], Tensor]
) -> Callable[..., list[Tensor]]:
    """`function` as an operator takes it: with types of its schema, and only tensors in a list out."""

    def listed(*args: Any) -> list[Tensor]:
        given = iter(args)
        results = function(*(parameter.unpack(given) for parameter in parameters))
        results = (results,) if isinstance(results, Tensor) else results
        return [prepared(result) for result in results if result is not None]

    schema = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=kind)
        for parameter in parameters
        for name, kind in parameter.schema
    ]
    listed.__signature__ = inspect.Signature(schema, return_annotation=list[Tensor])  # type: ignore[attr-defined]
    return listed
