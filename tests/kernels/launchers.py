"""The products that launchers compute, beside their oracles: a table that several tests go through."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.kernels.checks import TILE, assert_accurate, dense, normal
from tpkernels.gate.accuracy import BOUND
from tpkernels.kernels import reference
from tpkernels.kernels.activations import ACTIVATIONS, GATE_OF
from tpkernels.kernels.dglu import dglu
from tpkernels.kernels.dgrad import dgrad, dgrad_act
from tpkernels.kernels.dgrad_pairs import dgrad_pairs
from tpkernels.kernels.glu import glu_fwd
from tpkernels.kernels.linear import linear_fwd
from tpkernels.kernels.wgrad import wgrad

Results = tuple[Tensor | None, ...]


@dataclass(frozen=True)
class Product:
    """A launcher of T tokens, K in_features and N out_features."""

    operands: Mapping[str, str]  # by which of these sizes
    launcher: Callable[..., Any]
    oracle: Callable[..., Any]
    choice: Mapping[str, Iterable[str]] = field(default_factory=dict)  # the option that has several values
    optional: Mapping[str, bool] = field(default_factory=dict)  # asks for all results

    @property
    def values(self) -> list[str]:
        return [value for values in self.choice.values() for value in values]

    def random(self, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        size = dict(zip("TKN", shape, strict=True)) | {"1": 1}
        depth = max(size["K" if "x" in self.operands else "N"], 1)
        made = []
        for name, sizes in self.operands.items():
            rows, cols = (size[letter] for letter in sizes.rjust(2, "1"))
            one = normal(rows, cols, dtype, device)[0 if len(sizes) == 1 else slice(None)]
            made.append(one / depth**0.5 if name.startswith("w") else one)
        return made

    def compute(self, operands: Iterable[Tensor | None], value: str | None = None, **how: Any) -> Results:
        return _tupled(self.launcher(*operands, **self._named(value), **{**self.optional, **how}))

    def exact(self, operands: Iterable[Tensor | None], value: str | None = None) -> tuple[Tensor, ...]:
        return _tupled(self.oracle(*operands, **self._named(value)))

    def _named(self, value: str | None) -> dict[str, str]:
        return {option: value or self.values[1] for option in self.choice}


def _tupled(results: Any) -> Any:
    return results if isinstance(results, tuple) else (results,)


PRODUCTS = {
    "linear": Product(
        {"x": "TK", "weight": "NK", "bias": "N"},
        linear_fwd,
        reference.linear_ref,
        {"activation": ACTIVATIONS},
        {"keep_z": True},
    ),
    "glu": Product(
        {"x": "TK", "w_gate": "NK", "w_up": "NK"},
        glu_fwd,
        reference.glu_ref,
        {"kind": GATE_OF},
        {"keep_gu": True},
    ),
    "dgrad": Product({"dy": "TN", "weight": "NK"}, dgrad, reference.dgrad_ref),
    "dgrad_pairs": Product(
        {"dy": "TN", "weight": "NK", "dy2": "TN", "weight2": "NK"}, dgrad_pairs, reference.dgrad_pairs_ref
    ),
    "dgrad_act": Product(
        {"dy": "TN", "weight": "NK", "z": "TK"},
        dgrad_act,
        reference.dgrad_act_ref,
        {"activation": ACTIVATIONS},
        {"bias_grad": True},
    ),
    "dglu": Product(
        {"dy": "TN", "weight": "NK", "g": "TK", "u": "TK"},
        dglu,
        reference.dglu_ref,
        {"kind": GATE_OF},
        {"emit_h": True},
    ),
    "wgrad": Product({"dy": "TN", "x": "TK"}, wgrad, reference.wgrad_ref),
}
OF_ROWS = {name: product for name, product in PRODUCTS.items() if name != "wgrad"}  # one result a token
CHOICES = {f"{name}-{value}": (name, value) for name in PRODUCTS for value in PRODUCTS[name].values}


def assert_product(
    name: str, operands: Iterable[Tensor | None], value: str | None = None, tile: Any = TILE, **how: Any
) -> None:
    """The launcher's results are accurate, and its operands as before."""
    product, operands = PRODUCTS[name], list(operands)
    before = [one if one is None else one.clone() for one in operands]
    ours = product.compute(operands, value, tile=tile, **how)
    assert_results(name, ours, operands, value)
    for given, copy in zip(operands, before, strict=True):
        assert given is None or torch.equal(given, copy)


def assert_results(
    name: str, ours: Results, operands: Iterable[Tensor | None], value: str | None = None
) -> None:
    product, operands = PRODUCTS[name], list(operands)
    exact = product.exact([one if one is None else one.double() for one in operands], value)
    torchs = product.exact([one if one is None else dense(one) for one in operands], value)
    for number, (one, truth, other) in enumerate(zip(ours, exact, torchs, strict=True)):
        if truth.ndim == 1:  # relative to the magnitudes that are summed: a sum may cancel to nearly nothing
            assert one.dtype == torch.float32
            assert (one.double() - truth).norm() <= BOUND[torch.float32] * exact[0].abs().sum(0).norm()
        else:
            assert one.dtype == other.dtype
            assert_accurate(one, truth, other, f"result {number} of {name}")
