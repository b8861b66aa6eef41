"""Products by the kernels of their records, beside float64: what several tests go through."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from tests.kernels.checks import TILE, assert_accurate, dense, normal
from tpkernels.dispatch import products
from tpkernels.dispatch.record import Layer
from tpkernels.gate.numerics import BOUND
from tpkernels.kernels.activations import ACTIVATIONS, GATE_OF

PRODUCTS = {name: record for name, record in products.PRODUCTS.items() if not record.changes_first}
OF_ROWS = [name for name in PRODUCTS if name != "wgrad"]  # one result a token
VALUES = {"linear": ACTIVATIONS, "glu": GATE_OF, "dgrad_act": ACTIVATIONS, "dglu": GATE_OF}
CHOICES = {f"{name}-{value}": (name, value) for name, values in VALUES.items() for value in values}

Call = dict[str, Any]  # arguments by their names


def arguments(name, shape, dtype, device, value: str | None = None, asked: bool = True) -> Call:
    """Random ones. shape: tokens, in_features, out_features; value: activation or gate; asked: all results"""
    tokens, depth, cols = shape
    layer = Layer(tokens, cols, depth, dtype, value or "gelu", value or "geglu", asked, asked)
    record = PRODUCTS[name]
    call = dict(signature(record.by_torch).bind(*record.sample(layer)).arguments)
    depth = max(depth if "x" in call else cols, 1)
    for word, given in call.items():
        if isinstance(given, Tensor):
            made = normal(*(1, *given.shape)[-2:], dtype, device).view(given.shape)
            call[word] = made / depth**0.5 if word.startswith("w") else made
    return call


def computed(name: str, call: Call, **how: Any) -> tuple[Tensor | None, ...]:
    return _tupled(PRODUCTS[name].by_kernel(*call.values(), **{"tile": TILE, **how}))


def exact(name: str, call: Mapping[str, Any]) -> tuple[Tensor | None, ...]:
    """By torch, in the dtype of the arguments."""
    record = PRODUCTS[name]
    return _tupled(record.by_torch(*call.values()))


def _tupled(results: Any) -> Any:
    return results if isinstance(results, tuple) else (results,)


def _with_tensors(change: Any, call: Call) -> Call:
    return {word: change(one) if isinstance(one, Tensor) else one for word, one in call.items()}


def assert_product(name: str, call: Call, **how: Any) -> None:
    """The kernel's results are accurate, and its operands as before."""
    tensors = [one for one in call.values() if isinstance(one, Tensor)]
    before = [one.clone() for one in tensors]
    ours = computed(name, call, **how)
    torch.testing.assert_close(tensors, before, rtol=0, atol=0)
    truths, torchs = (exact(name, _with_tensors(change, call)) for change in (torch.Tensor.double, dense))
    for number, (one, truth, other) in enumerate(zip(ours, truths, torchs, strict=True)):
        if truth is None:
            assert one is None
        elif (
            truth.ndim == 1
        ):  # relative to the magnitudes that are summed: a sum may cancel to nearly nothing
            assert one.dtype == torch.float32
            assert (one.double() - truth).norm() <= BOUND[torch.float32] * truths[0].abs().sum(0).norm()
        else:
            assert one.dtype == other.dtype
            assert_accurate(one, truth, other, f"result {number} of {name}")
