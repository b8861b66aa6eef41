"""Functions that torch.compile sees as one operator, and that eager code calls as they are.

An operator of torch's dispatcher returns as many tensors whatever its arguments. These return a list instead,
without the results that were not asked for; `fake`, which gives shapes, says by None which those are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import (
    Annotated,
    Any,
    Generic,
    Literal,
    ParamSpec,
    TypeVar,
    cast,
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

    run: tensors, lists of them, numbers, words and NamedTuples of these in; a tensor, or a tuple or list of
        tensors and None out; no result is an input, no input is changed
    fake: the same signature; empty tensors of the same shapes, dtypes and contiguous strides
    """

    def __init__(self, name: str, run: Callable[P, R], fake: Callable[P, R]) -> None:
        self.name, self.run, self.fake = name, run, fake
        hints = get_type_hints(run, include_extras=True)
        del hints["return"]
        self._records = [hint if _is_record(hint) else None for hint in hints.values()]
        passed = {
            field: _passed(kind)
            for name, hint in hints.items()
            for field, kind in _fields(name, hint).items()
        }
        self._packs = [packed.pack for packed in passed.values()]
        definition = torch.library.custom_op(
            f"tpkernels::{name}",
            _listing(run, passed, self._records, lambda t: t.contiguous()),
            mutates_args=(),
        )
        definition.register_fake(_listing(fake, passed, self._records, lambda t: t))
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
        fields: list[Any] = []
        for arg, record in zip(args, self._records, strict=False):
            if record is None:
                fields.append(arg)
            else:
                fields += cast("tuple[Any, ...]", arg)
        packed = [pack(field) for pack, field in zip(self._packs, fields, strict=False)]
        given = iter(self.overload(*packed, **kwargs))
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
    function: Callable[..., Any],
    passed: dict[str, Packed],
    records: Sequence[Any],
    prepared: Callable[[Tensor], Tensor],
) -> Callable[..., list[Tensor]]:
    """`function` as an operator takes it: with types of its schema, and only tensors in a list out."""

    def listed(*args: Any) -> list[Tensor]:
        fields = iter([packed.unpack(arg) for packed, arg in zip(passed.values(), args, strict=True)])
        results = function(
            *(
                next(fields) if record is None else record(*islice(fields, len(record._fields)))
                for record in records
            )
        )
        results = (results,) if isinstance(results, Tensor) else results
        return [prepared(result) for result in results if result is not None]

    parameters = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=packed.schema)
        for name, packed in passed.items()
    ]
    listed.__signature__ = inspect.Signature(parameters, return_annotation=list[Tensor])  # type: ignore[attr-defined]
    return listed


def _is_record(hint: Any) -> bool:
    return isinstance(hint, type) and hasattr(hint, "_fields")


def _fields(name: str, hint: Any) -> dict[str, Any]:
    """What goes through the dispatcher for an argument: the fields of a NamedTuple, else itself."""
    return get_type_hints(hint, include_extras=True) if _is_record(hint) else {name: hint}


def _passed(hint: Any) -> Packed:
    """How an argument goes through the dispatcher, where words are text and all sequences of one kind."""
    if get_origin(hint) is Annotated:
        return next(extra for extra in get_args(hint) if isinstance(extra, Packed))
    schema = str if get_origin(hint) is Literal else Sequence[Tensor] if hint == list[Tensor] else hint
    return Packed(schema, _same, _same)


def _same(argument: Any) -> Any:
    return argument
