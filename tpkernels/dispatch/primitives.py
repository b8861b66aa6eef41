"""Primitives as functions, such as `primitives.dgrad_act(...)`, whose arguments are given in order.

Compiling, a call is an operator of torch's dispatcher; else it is computed by torch, by our kernel, or by
the candidate that was timed to be fastest (see `backends`, `autotune`). A kernel has no derivative: where
autograd would record one, as in a backward that is to be differentiated again, torch computes.
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
from tpkernels.dispatch.record import Primitive
from tpkernels.kernels import invariance

if TYPE_CHECKING:
    from tpkernels.dispatch.autotune import Autotuner

P = ParamSpec("P")
R = TypeVar("R")


RECORDS: dict[str, Primitive[..., Any]] = {}


@cache
def autotuner_on(device: torch.device) -> Autotuner:
    """Return the autotuner of a GPU, imported at the first call: a CPU has nothing to choose from."""
    autotuner: Autotuner = import_module("tpkernels.dispatch.autotune").autotuner_on(device)
    return autotuner


def _any_requires_grad(args: Sequence[object]) -> bool:
    """Whether a tensor among the arguments requires a gradient."""
    for arg in args:  # noqa: SIM110  # a generator takes twice its time
        if isinstance(arg, Tensor) and arg.requires_grad:
            return True
    return False


def _way_of(
    record: Primitive[..., Any], args: Sequence[Any], out: Sequence[Tensor] = ()
) -> Callable[..., Any]:
    """Return what computes a primitive of these arguments: the only place where that is decided.

    out: given tensors, its first argument
    """
    like = args[0]
    assert isinstance(like, Tensor), "a primitive's first argument is a tensor"
    way = record.torch
    if not (torch.is_grad_enabled() and _any_requires_grad(args)):
        backend = backends.resolve_backend_now(like.device)
        if backend == "fastest" and record.kernel is not None:
            return autotuner_on(like.device).way_of(record, args, out)
        if backend == "triton" or (
            backend != "torch" and (not callable(record.on_gpu) or record.on_gpu(*args))
        ):
            way = record.ours()
    return way.into if out else way.run


def primitive_in_place(record: Primitive[P, R]) -> Callable[P, R]:
    """Return the function that computes a primitive that changes an argument. Compiled code never sees it."""
    RECORDS[record.name] = record

    @wraps(record.by_torch)
    def run(*args: Any) -> Any:
        return _way_of(record, args)(*args)

    return run  # type: ignore[return-value]  # its arguments are those of P, in order


def primitive(record: Primitive[P, R]) -> Callable[P, R]:
    """Return the function that computes a primitive, and make its operator for torch.compile."""
    by_torch, eager = record.by_torch, primitive_in_place(record)
    operator = define(record.name, record.torch_schema, eager, record.fake or by_torch)
    flags = record.flags

    def compiled(*args: Any) -> Any:
        refuse_forward_mode(record.name)
        found = operator(*args)
        if not any(flag is not None for flag in flags):
            return found
        there = iter(found)
        return tuple(next(there) if flag is None or args[flag] else None for flag in flags)

    # one frame and no more: around tiny tensors a second one costs a tenth of the product
    @wraps(by_torch)
    def call(*args: Any) -> Any:
        if is_compiling():
            return compiled(*args)
        if backends.backend == "auto" and args[0].is_cpu and not invariance.batch_invariant:
            return by_torch(*args)  # type: ignore[call-arg]  # they are those of P
        return _way_of(record, args)(*args)

    call.__name__ = record.name  # by which `into` knows it
    return call  # type: ignore[return-value]


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


def into(primitive: Callable[..., object], out: Sequence[Tensor], *args: Any) -> None:
    """Compute a primitive into given tensors, such as rows of larger matrices.

    out: one for each result that is asked for. Without activation z of `linear` aliases y; pass it once

    Autograd cannot record it, and compiled code never sees it.
    """
    assert not (torch.is_grad_enabled() and _any_requires_grad(args))
    _way_of(RECORDS[primitive.__name__], args, out)(out, *args)
