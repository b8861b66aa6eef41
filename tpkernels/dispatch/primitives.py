"""Primitives as functions, such as `primitives.dgrad_act(...)`.

Compiling, a call is an operator of torch's dispatcher; else it is computed by torch, by our kernel, or by
whoever was timed to be fastest (see `backends`). A kernel has no derivative: where autograd would record one,
as in a backward that is to be differentiated again, torch computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, wraps
from importlib import import_module
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.compiler import is_compiling

from tpkernels.dispatch import backends, products, scaled
from tpkernels.dispatch.operators import define, refuse_forward_mode
from tpkernels.dispatch.record import Primitive, copied_into
from tpkernels.kernels import invariance

if TYPE_CHECKING:
    from tpkernels.dispatch.chooser import Chooser

P = ParamSpec("P")
R = TypeVar("R")


RECORDS: dict[str, Primitive[..., Any]] = {}


@cache
def chooser_on(device: torch.device) -> Chooser:
    """Return the chooser of a GPU, imported at the first call: a CPU has nothing to choose from."""
    chooser: Chooser = import_module("tpkernels.dispatch.chooser").chooser_on(device)
    return chooser


def _any_requires_grad(args: Sequence[object]) -> bool:
    """Whether a tensor among the arguments requires a gradient."""
    for arg in args:  # noqa: SIM110  # a generator takes twice its time
        if isinstance(arg, Tensor) and arg.requires_grad:
            return True
    return False


def primitive_in_place(record: Primitive[P, R]) -> Callable[P, R]:
    """Return the function that computes a primitive that changes an argument. Compiled code never sees it."""
    RECORDS[record.name] = record
    by_torch = record.by_torch

    @wraps(by_torch)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        like = args[0]
        assert isinstance(like, Tensor), "a primitive's first argument is a tensor"
        if torch.is_grad_enabled() and _any_requires_grad(args):
            return by_torch(*args, **kwargs)
        match backends.resolve_backend(like.device):
            case "triton":
                return record.by_kernel(*args, **kwargs)
            case "fastest" if record.kernel is not None:
                return chooser_on(like.device).call(record, *args)
            case "invariant" if record.kernel is not None:
                return record.by_kernel(*args, **kwargs)
            case "fastest" | "invariant" if record.takes is not None and record.takes(*args, **kwargs):
                return record.by_kernel(*args, **kwargs)
        return by_torch(*args, **kwargs)

    return run


def primitive(record: Primitive[P, R]) -> Callable[P, R]:
    """Return the function that computes a primitive, and make its operator for torch.compile."""
    by_torch, eager = record.by_torch, primitive_in_place(record)
    operator = define(record.name, record.schema, eager, record.fake or by_torch)

    def compiled(*args: P.args, **kwargs: P.kwargs) -> Any:
        refuse_forward_mode(record.name)
        found = operator(*args, **kwargs)
        if record.given is None:
            return found
        there = iter(found)
        return tuple(next(there) if asked else None for asked in record.given(*args, **kwargs))

    # one frame and no more: around tiny tensors a second one costs a tenth of the product
    @wraps(by_torch)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if is_compiling():
            return compiled(*args, **kwargs)  # type: ignore[no-any-return]
        if backends.backend == "auto" and args[0].is_cpu and not invariance.batch_invariant:  # type: ignore[attr-defined]
            return by_torch(*args, **kwargs)
        return eager(*args, **kwargs)

    call.__name__ = record.name  # by which `into` knows it
    return call


linear = primitive(products.linear)
glu = primitive(products.glu)
dgrad = primitive(products.dgrad)
dgrad_pairs = primitive(products.dgrad_pairs)
dgrad_act = primitive(products.dgrad_act)
dglu = primitive(products.dglu)
wgrad = primitive(products.wgrad)
bias_grad = primitive(products.bias_grad)
quantize = primitive(scaled.quantize)
dequantize = primitive(scaled.dequantize)
scaled_linear = primitive(scaled.scaled_linear)

wgrad_accumulate_ = primitive_in_place(products.wgrad_accumulate_)


def into(primitive: Callable[P, object], out: Sequence[Tensor], *args: P.args, **kwargs: P.kwargs) -> None:
    """Compute a primitive into given tensors, such as rows of larger matrices.

    out: one for each result that is asked for. Without activation z of `linear` aliases y; pass it once

    Autograd cannot record it, and compiled code never sees it. A primitive without `Primitive.into` is
    computed elsewhere and copied.
    """
    record, like = RECORDS[primitive.__name__], args[0]
    assert isinstance(like, Tensor), "a primitive's first argument is a tensor"
    assert not kwargs, "arguments of primitives are given in order"
    assert not (torch.is_grad_enabled() and _any_requires_grad(args))
    backend = backends.resolve_backend(like.device)
    if record.into is None:
        copied_into(primitive, out, *args)
    elif backend == "torch":
        record.into(out, *args)
    elif backend == "fastest":
        chooser_on(like.device).call_into(record, out, *args)
    else:
        record.by_kernel(*args, out=out)
