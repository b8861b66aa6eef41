"""The primitives as callers have them: `primitives.dgrad_act(...)`.

Compiling, a call is an operator of torch's dispatcher; else it is computed by torch, by our kernel, or by
whoever was timed to be fastest (see `backends`). A kernel has no derivative: where autograd would record one,
as in a backward that is to be differentiated again, torch computes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.compiler import is_compiling

from tpkernels.dispatch import backends, norms, products, vocabulary
from tpkernels.dispatch.chooser import chooser_on
from tpkernels.dispatch.operators import Operator
from tpkernels.dispatch.record import Primitive
from tpkernels.kernels import invariance

P = ParamSpec("P")
R = TypeVar("R")


RECORDS: dict[str, Primitive[..., Any]] = {}
OPERATORS: dict[str, Operator[..., Any]] = {}  # but of those that change an argument


def _eager(record: Primitive[P, R]) -> Callable[P, R]:
    """The primitive, by whoever computes where its first argument lies."""
    RECORDS[record.name] = record
    by_torch = record.by_torch

    @wraps(by_torch)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        like = args[0]
        assert isinstance(like, Tensor), "a primitive's first argument is a tensor"
        if torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args):
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

    return call


linear = _primitive(products.linear)
glu = _primitive(products.glu)
dgrad = _primitive(products.dgrad)
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

# these change an argument: compiled code never sees them
wgrad_accumulate_ = _eager(products.wgrad_accumulate_)
cross_entropy_grad = _eager(vocabulary.cross_entropy_grad)


def linear_into(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """y = x weightᵀ + bias, into rows of a larger tensor."""
    if backends.resolve_backend(x.device) != "torch":
        y.copy_(linear(x, weight, bias, "none", False)[0])
    elif bias is None:
        torch.mm(x, weight.t(), out=y)
    else:
        torch.addmm(bias, x, weight.t(), out=y)
