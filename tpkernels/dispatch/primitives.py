"""The primitives as callers have them: `primitives.dgrad_act(...)`.

Compiling, a call is an operator of torch's dispatcher; else it is computed by torch, by our kernel, or by
whoever was timed to be fastest (see `backends`). A kernel has no derivative: where autograd would record one,
as in a backward that is to be differentiated again, torch computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.compiler import is_compiling

from tpkernels.dispatch import backends, norms, products, scaled, vocabulary
from tpkernels.dispatch.chooser import chooser_on
from tpkernels.dispatch.operators import Operator
from tpkernels.dispatch.record import Primitive, copied_into
from tpkernels.kernels import invariance

P = ParamSpec("P")
R = TypeVar("R")


RECORDS: dict[str, Primitive[..., Any]] = {}
OPERATORS: dict[str, Operator[..., Any]] = {}  # but of those that change an argument


def _any_requires_grad(args: Sequence[object]) -> bool:
    """Whether one of them does, as autograd is to record it."""
    for arg in args:  # noqa: SIM110  # a generator takes twice its time
        if isinstance(arg, Tensor) and arg.requires_grad:
            return True
    return False


def _eager(record: Primitive[P, R]) -> Callable[P, R]:
    """The primitive, by whoever computes where its first argument lies."""
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


def _primitive(record: Primitive[P, R]) -> Callable[P, R]:
    by_torch, eager = record.by_torch, _eager(record)
    operator = Operator(record.name, eager, record.fake or by_torch, record.given)
    OPERATORS[record.name] = operator

    # one frame and no more: around tiny tensors a second one costs a tenth of the product
    @wraps(by_torch)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if is_compiling():
            return operator(*args, **kwargs)
        if backends.backend == "auto" and args[0].is_cpu and not invariance.batch_invariant:  # type: ignore[attr-defined]
            return by_torch(*args, **kwargs)
        return eager(*args, **kwargs)

    call.__name__ = record.name  # by which `into` knows it
    return call


linear = _primitive(products.linear)
glu = _primitive(products.glu)
dgrad = _primitive(products.dgrad)
dgrad_pairs = _primitive(products.dgrad_pairs)
dgrad_act = _primitive(products.dgrad_act)
dglu = _primitive(products.dglu)
wgrad = _primitive(products.wgrad)
bias_grad = _primitive(products.bias_grad)
rms_norm = _primitive(norms.rms_norm)
rms_norm_grad = _primitive(norms.rms_norm_grad)
layer_norm = _primitive(norms.layer_norm)
layer_norm_grad = _primitive(norms.layer_norm_grad)
lookup = _primitive(vocabulary.lookup)
lookup_grad = _primitive(vocabulary.lookup_grad)
softmax_statistics = _primitive(vocabulary.softmax_statistics)
quantize = _primitive(scaled.quantize)
quantize_act = _primitive(scaled.quantize_act)
quantize_glu = _primitive(scaled.quantize_glu)
dequantize = _primitive(scaled.dequantize)
scaled_linear = _primitive(scaled.scaled_linear)

# these change an argument: compiled code never sees them
wgrad_accumulate_ = _eager(products.wgrad_accumulate_)
cross_entropy_grad = _eager(vocabulary.cross_entropy_grad)


def into(primitive: Callable[P, object], out: Sequence[Tensor], *args: P.args, **kwargs: P.kwargs) -> None:
    """A primitive's results, computed into given tensors, such as rows of larger matrices.

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
