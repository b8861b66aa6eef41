"""Functions that torch.compile sees as one operator, and that eager code calls as they are.

In an autocast region they compute in the dtypes that they are given: what is wide within, such as sums, stays
so. Whoever calls them casts what goes in; compiled code runs without autocast anyway.

An operator of torch's dispatcher returns as many tensors whatever its arguments. These return a list instead,
without the results that were not asked for.
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
from torch.compiler import is_compiling

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
        tensors and None out; it changes no input, and gives none back
    fake: of the same arguments; tensors of the same shapes and dtypes
    given: which of its results a call gives, if some may be None; by default those that `fake` shows
    """

    def __init__(
        self,
        name: str,
        run: Callable[P, R],
        fake: Callable[..., R],
        given: Callable[P, Sequence[bool]] | None = None,
    ) -> None:
        self.name, self.run, self.fake = name, run, fake
        hints = get_type_hints(run, include_extras=True)
        result = hints.pop("return")
        self._given, self._kind = given, get_origin(result) or Tensor
        self._may_lack = any(type(None) in get_args(hint) for hint in get_args(result))
        self._parameters = [_parameter(word, hint) for word, hint in hints.items()]
        run_listed, fake_listed = (_listing(function, self._parameters) for function in (run, fake))
        torch.library.custom_op(f"tpkernels::{name}", run_listed, mutates_args=()).register_fake(fake_listed)
        self.overload: Callable[..., list[Tensor]] = getattr(torch.ops.tpkernels, name).default

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if not is_compiling():
            if not torch._C._is_any_autocast_enabled():
                return self.run(*args, **kwargs)
            with torch._C._DisableAutocast():
                return self.run(*args, **kwargs)
        if in_forward_mode():  # operators drop tangents without a word
            raise NotImplementedError(
                f"{self.name}: expected no forward-mode derivative (jvp) under torch.compile, got one; use "
                "reverse mode, or torch's own layers"
            )
        found = iter(self.overload(*self.packed(*args), **kwargs))
        results: Any
        if self._kind is Tensor:
            results = next(found)
        elif not self._may_lack:
            results = self._kind(found)
        else:
            shown: Any = (self._given or self.fake)(*args, **kwargs)
            given = [each is not None and each is not False for each in shown]
            results = self._kind(next(found) if there else None for there in given)
        return results  # type: ignore[no-any-return]

    def packed(self, *args: Any) -> list[Any]:
        """Return the arguments as `overload` takes them."""
        return [part for p, arg in zip(self._parameters, args, strict=False) for part in p.pack(arg)]


def in_forward_mode() -> bool:
    """Whether tensors may carry tangents, which do not show in `requires_grad`."""
    return forward_ad._current_level >= 0


@dataclass(frozen=True)
class _Parameter:
    """A parameter of `run`. schema: name and type of each argument of the operator that it is packed into"""

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
    """Return the type by which a schema takes a hint: str for literals, Sequence for lists."""
    if get_origin(hint) is Literal:
        return str
    if get_origin(hint) in (Union, UnionType):
        return Union[tuple(_schema_type(choice) for choice in get_args(hint))]  # noqa: UP007
    return Sequence[Tensor] if hint == list[Tensor] else hint


def _listing(function: Callable[..., Any], parameters: list[_Parameter]) -> Callable[..., list[Tensor]]:
    """Return `function` as an operator takes it: with its schema's types, and only tensors in a list out."""

    def listed(*args: Any) -> list[Tensor]:
        passed = iter(args)
        with torch.no_grad():  # what is below the dispatcher is not recorded, whatever requires a gradient
            results = function(*(parameter.unpack(passed) for parameter in parameters))
        results = (results,) if isinstance(results, Tensor) else results
        given: list[Tensor] = []
        for result in results:
            if result is not None:  # an operator may not return a tensor twice
                twice = any(result is other for other in given)
                given.append(result.clone() if twice else result.contiguous())
        return given

    schema = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=kind)
        for parameter in parameters
        for name, kind in parameter.schema
    ]
    listed.__signature__ = inspect.Signature(schema, return_annotation=list[Tensor])  # type: ignore[attr-defined]
    return listed
