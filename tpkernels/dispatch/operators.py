"""Functions that torch.compile sees as one operator, and that eager code calls as they are.

An operator of torch's dispatcher returns as many tensors whatever its arguments. These return a list instead,
without the results that were not asked for.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, ParamSpec, TypeVar, get_args, get_origin, get_type_hints

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

    run: tensors, lists of them, numbers and words in; a tensor, or a tuple or list of tensors and None
        out; it changes no input, and gives none back
    fake: the same signature; tensors of the same shapes and dtypes
    given: which of its results a call gives, if some may be None; by default those that `fake` shows
    """

    def __init__(
        self,
        name: str,
        run: Callable[P, R],
        fake: Callable[P, R],
        given: Callable[P, Sequence[bool]] | None = None,
    ) -> None:
        self.name, self.run, self.fake = name, run, fake
        passed = {name: _passed(hint) for name, hint in get_type_hints(run, include_extras=True).items()}
        result = passed.pop("return").schema
        self._given, self._kind = given, get_origin(result) or Tensor
        self._may_lack = any(type(None) in get_args(hint) for hint in get_args(result))
        self._packs = [packed.pack for packed in passed.values()]
        definition = torch.library.custom_op(f"tpkernels::{name}", _listing(run, passed), mutates_args=())
        definition.register_fake(_listing(fake, passed))
        self.overload: Callable[..., list[Tensor]] = getattr(torch.ops.tpkernels, name).default

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.compiler.is_compiling():
            return self.run(*args, **kwargs)
        if in_forward_mode():  # operators drop tangents without a word
            raise NotImplementedError(
                f"{self.name}: expected no forward-mode derivative (jvp) under torch.compile, got one; use "
                "reverse mode, or torch's own layers"
            )
        packed = [pack(arg) for pack, arg in zip(self._packs, args, strict=False)]
        found = iter(self.overload(*packed, **kwargs))
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


def in_forward_mode() -> bool:
    """Whether tensors may carry tangents, which do not show in `requires_grad`."""
    return forward_ad._current_level >= 0


def _listing(function: Callable[..., Any], passed: dict[str, Packed]) -> Callable[..., list[Tensor]]:
    """`function` as an operator takes it: with types of its schema, and only tensors in a list out."""

    def listed(*args: Any) -> list[Tensor]:
        results = function(*(packed.unpack(arg) for packed, arg in zip(passed.values(), args, strict=True)))
        results = (results,) if isinstance(results, Tensor) else results
        given: list[Tensor] = []
        for result in results:
            if result is not None:  # an operator may not return a tensor twice
                twice = any(result is other for other in given)
                given.append(result.clone() if twice else result.contiguous())
        return given

    parameters = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=packed.schema)
        for name, packed in passed.items()
    ]
    listed.__signature__ = inspect.Signature(parameters, return_annotation=list[Tensor])  # type: ignore[attr-defined]
    return listed


def _passed(hint: Any) -> Packed:
    """How an argument goes through the dispatcher, where words are text and all sequences of one kind."""
    if get_origin(hint) is Annotated:
        return next(extra for extra in get_args(hint) if isinstance(extra, Packed))
    schema = str if get_origin(hint) is Literal else Sequence[Tensor] if hint == list[Tensor] else hint
    return Packed(schema, _same, _same)


def _same(argument: Any) -> Any:
    return argument
