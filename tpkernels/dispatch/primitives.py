"""The primitives as callers have them: `primitives.dgrad_act(...)`.

Compiling, a call is an operator of torch's dispatcher; else it is computed by torch, by our kernel, or by
whoever was timed to be fastest (see `backends`). A kernel has no derivative: where autograd would record one,
as in a backward that is to be differentiated again, torch computes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from tpkernels.dispatch import backends, norms, products, vocabulary
from tpkernels.dispatch.chooser import chooser_on
from tpkernels.dispatch.operators import Operator
from tpkernels.dispatch.record import Primitive
from tpkernels.kernels import invariance

P = ParamSpec("P")
R = TypeVar("R")


def _eager(record: Primitive[P, R]) -> Callable[P, R]:
    """The primitive, by whoever computes where its first argument lies."""
    by_torch = record.by_torch

    @wraps(by_torch)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        like = args[0]
        assert isinstance(like, Tensor), "a primitive's first argument is a tensor"
        if like.is_cpu and backends.backend == "auto" and not invariance.batch_invariant:
            return by_torch(*args, **kwargs)  # the usual case on a CPU, at once
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


def _operator(record: Primitive[P, R]) -> Operator[P, R]:
    return Operator(record.name, _eager(record), record.fake or record.by_torch, record.given)


linear = _operator(products.linear)
glu = _operator(products.glu)
dgrad = _operator(products.dgrad)
dgrad_act = _operator(products.dgrad_act)
dglu = _operator(products.dglu)
wgrad = _operator(products.wgrad)
bias_grad = _operator(products.bias_grad)
rms_norm = _operator(norms.rms_norm)
rms_norm_grad = _operator(norms.rms_norm_grad)
layer_norm = _operator(norms.layer_norm)
layer_norm_grad = _operator(norms.layer_norm_grad)
lookup = _operator(vocabulary.lookup)
lookup_grad = _operator(vocabulary.lookup_grad)
softmax_statistics = _operator(vocabulary.softmax_statistics)

# these change an argument: compiled code never sees them
wgrad_accumulate_ = _eager(products.wgrad_accumulate_)
cross_entropy_grad = _eager(vocabulary.cross_entropy_grad)


def linear_into(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """y = x weightᵀ + bias, into rows of a larger tensor."""
    if backends.resolve_backend(x.device) != "torch":
        y.copy_(linear.run(x, weight, bias, "none", False)[0])
    elif bias is None:
        torch.mm(x, weight.t(), out=y)
    else:
        torch.addmm(bias, x, weight.t(), out=y)
