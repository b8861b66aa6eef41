"""Primitives as functions, such as `primitives.dgrad_act(...)`, whose arguments are given in order.

Compiling, a call is an operator of torch's dispatcher; else it is computed by torch, by our kernel, or by
the candidate that was timed to be fastest (see `backends`, `autotune`). A kernel has no derivative: where
autograd would record one, as in a backward that is to be differentiated again, torch computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, wraps
from importlib import import_module
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.compiler import is_compiling

from tpkernels import journal
from tpkernels.dispatch import backends, products, scaled
from tpkernels.dispatch.operators import define, refuse_forward_mode
from tpkernels.dispatch.record import Primitive
from tpkernels.kernels import invariance

if TYPE_CHECKING:
    from tpkernels.dispatch.autotune import Autotuner

P = ParamSpec("P")
R = TypeVar("R")


RECORDS: dict[str, Primitive[..., Any]] = {}
PRODUCT_NAMES = frozenset(products.PRODUCTS) | {"scaled_linear", "scatter_linear"}  # which hide transfers


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


def _told(record: Primitive[..., Any], args: Sequence[Any], out: Sequence[Tensor] = ()) -> Any:
    """Compute a primitive, and tell the journal by whom."""
    way = _way_of(record, args, out)
    by, why = _who(record, args, out, way)
    with told(record.name, args, by, why):
        return way(out, *args) if out else way(*args)


def told(name: str, args: Sequence[object], by: str, why: str = "") -> AbstractContextManager[None]:
    """Return a context that tells the journal who computes what; nothing while nobody reads it."""
    if not (journal.readers or journal.is_profiled()):
        return nullcontext()
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    shapes = " ".join(str(tuple(tensor.shape)) for tensor in tensors)
    kind: journal.StepKind = "product" if name in PRODUCT_NAMES else "pass"
    step = journal.OpStep(kind, name, f"{name} {shapes} by {by}", tensors, by=by, why=why)
    return journal.entered(step)


def _who(
    record: Primitive[..., Any], args: Sequence[Any], out: Sequence[Tensor], way: Callable[..., Any]
) -> tuple[str, str]:
    """Return who computes a primitive, and why nobody better does."""
    device = args[0].device
    backend = backends.resolve_backend_now(device)
    recorded = torch.is_grad_enabled() and _any_requires_grad(args)
    if backend == "fastest" and record.kernel is not None and not recorded:
        autotuner = autotuner_on(device)
        choice = autotuner.known(autotuner.request(record, args, out))
        return (choice.name, str(choice)) if choice else ("torch", "it was not timed yet")
    if way not in (record.torch.run, record.torch.into):
        return "Triton", ""
    if recorded:
        return "torch", "autograd records it, and a kernel has no derivative"
    if backend == "torch":
        asked = backends.backend == "torch"
        return "torch", "TPKERNELS_BACKEND=torch" if asked else f"kernels are for GPUs, and it is on {device}"
    return "torch", "no kernel takes these operands"


def primitive_in_place(record: Primitive[P, R]) -> Callable[P, R]:
    """Return the function that computes a primitive that changes an argument. Compiled code never sees it."""
    RECORDS[record.name] = record

    @wraps(record.by_torch)
    def run(*args: Any) -> Any:
        if journal.readers or journal.is_profiled():
            return _told(record, args)
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
        if journal.readers or journal.is_profiled():
            return _told(record, args)
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
    record = RECORDS[primitive.__name__]
    if journal.readers or journal.is_profiled():
        _told(record, args, out)
    else:
        _way_of(record, args, out)(out, *args)
