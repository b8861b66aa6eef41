"""Each pass of a linear layer: ours, the naive way, and the strongest library compositions for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.shapes import Shape
from tpkernels import ops
from tpkernels.kernels.activations import Activation
from tpkernels.tuning.steps import steps_on

Operands = Callable[[int, int], Tensor]  # random matrices of the case's dtype and device


@dataclass(frozen=True)
class Case:
    """Ways to compute the same tensors, "ours" and "naive" among them."""

    name: str
    ways: Mapping[str, Callable[[], tuple[Tensor, ...]]]
    flops: int
    traffic: int  # bytes that a perfect kernel reads and writes

    def check(self) -> None:
        """Right before quick: every way agrees with the naive one as well as 16 bits allow."""
        expected = self.ways["naive"]()
        for name, way in self.ways.items():
            for i, (actual, truth) in enumerate(zip(way(), expected, strict=True)):
                error = float((actual.double() - truth.double()).norm() / truth.double().norm())
                if not error < 2e-2:
                    raise AssertionError(f"{self.name}: result {i} of {name} is off by {error:.1e}")


def passes_of(shape: Shape) -> list[str]:
    """The passes that are worth measuring on this layer."""
    extra = {"fc_up": ["mlp"], "fc_down": ["dgrad"]}
    return ["forward", "wgrad", "wgrad_add", *extra.get(shape.layer, [])]


def case_of(shape: Shape, pass_: str, dtype: torch.dtype, device: torch.device) -> Case:
    def normal(rows: int, cols: int) -> Tensor:
        matrix: Tensor = torch.randn(rows, cols, device=device).to(dtype) / cols**0.5
        return matrix

    build = {"forward": _forward, "wgrad": _wgrad, "wgrad_add": _wgrad_add, "mlp": _mlp, "dgrad": _dgrad_act}[
        pass_
    ]
    return build(shape, normal)


def _forward(shape: Shape, normal: Operands) -> Case:
    t, n, k = shape.tokens, shape.out_features, shape.in_features
    x, w = normal(t, k), normal(n, k)
    if shape.layer == "fc_up" and shape.model.gated:
        gate = normal(n, k)
        ways = {
            "ours": lambda: (ops.swiglu(x, gate, w),),
            "naive": lambda: (F.silu(F.linear(x, gate)) * F.linear(x, w),),
        }
        return Case(f"{shape}-forward-swiglu", ways, 2 * shape.flops, 2 * (t * k + 2 * n * k + t * n))
    if shape.layer == "fc_up":
        bias = normal(1, n)[0]
        ways = {
            "ours": lambda: (ops.linear(x, w, bias, "gelu_tanh"),),
            "naive": lambda: (F.gelu(F.linear(x, w, bias), approximate="tanh"),),
            "addmm_activation": lambda: (torch._addmm_activation(bias, x, w.T, use_gelu=True),),
        }
        return Case(f"{shape}-forward-gelu", ways, shape.flops, shape.traffic)
    ways = {"ours": lambda: (ops.linear(x, w),), "naive": lambda: (F.linear(x, w),)}
    return Case(f"{shape}-forward", ways, shape.flops, shape.traffic)


def _wgrad(shape: Shape, normal: Operands) -> Case:
    t, n, k = shape.tokens, shape.out_features, shape.in_features
    dy, x = normal(t, n), normal(t, k)
    steps = steps_on(x.device)
    ways = {"ours": lambda: (steps.wgrad(dy, x),), "naive": lambda: (dy.T @ x,)}
    return Case(f"{shape}-wgrad", ways, shape.flops, shape.traffic)


def _wgrad_add(shape: Shape, normal: Operands) -> Case:
    """Into an fp32 `main_grad`, against a product and an addition. Each way has a sum of its own."""
    t, n, k = shape.tokens, shape.out_features, shape.in_features
    dy, x = normal(t, n), normal(t, k)
    ours, naive = (torch.zeros(n, k, dtype=torch.float32, device=x.device) for _ in range(2))
    steps = steps_on(x.device)

    def accumulate() -> tuple[Tensor, ...]:
        steps.wgrad_accumulate_(ours, dy, x)
        return (ours,)

    ways = {"ours": accumulate, "naive": lambda: (naive.add_(dy.T @ x),)}
    return Case(f"{shape}-wgrad-add", ways, shape.flops, 2 * (t * n + t * k) + 8 * n * k)


def _dgrad_act(shape: Shape, normal: Operands) -> Case:
    """The down-projection's input gradient with the activation's: fc_down of an MLP that is not gated."""
    t, n, k = shape.tokens, shape.out_features, shape.in_features
    dy, w, z = normal(t, n), normal(n, k), normal(t, k)
    activation: Activation = "gelu_tanh"
    steps = steps_on(dy.device)
    ways = {
        "ours": lambda: (steps.dgrad_act(dy, w, z, activation, False)[0],),
        "naive": lambda: (torch.ops.aten.gelu_backward(dy @ w, z, approximate="tanh"),),
    }
    return Case(f"{shape}-dgrad-gelu", ways, shape.flops, 2 * (t * n + n * k + 2 * t * k))


def _mlp(shape: Shape, normal: Operands) -> Case:
    """Forward and backward of the whole MLP, all gradients."""
    t, ffn, hidden = shape.tokens, shape.out_features, shape.in_features
    x, w_up, w_down, dy = normal(t, hidden), normal(ffn, hidden), normal(hidden, ffn), normal(t, hidden)
    leaves = [x, w_up, w_down]
    gated = shape.model.gated
    w_gate = normal(ffn, hidden) if gated else None
    if w_gate is not None:
        leaves.append(w_gate)
    for leaf in leaves:
        leaf.requires_grad_()

    def ours() -> Tensor:
        return ops.mlp(x, w_up, None, w_down, None, w_gate=w_gate)

    def naive() -> Tensor:
        up = F.linear(x, w_up)
        h = F.gelu(up, approximate="tanh") if w_gate is None else F.silu(F.linear(x, w_gate)) * up
        return F.linear(h, w_down)

    def with_gradients(forward: Callable[[], Tensor]) -> Callable[[], tuple[Tensor, ...]]:
        return lambda: torch.autograd.grad(forward(), leaves, dy)

    ways = {
        "ours": with_gradients(ours),
        "naive": with_gradients(naive),
        "compiled": with_gradients(torch.compile(naive)),
    }
    products = 3 * (3 if gated else 2)
    traffic = 2 * products * (t * hidden + t * ffn + ffn * hidden) // 3
    return Case(f"{shape}-mlp", ways, products * shape.flops, traffic)
