"""Each pass of a linear layer: ours, the naive way, and the strongest library compositions for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.case import Case, Work
from bench.cases.local import Local
from bench.shapes import Shape
from tpkernels import ops
from tpkernels.dispatch import primitives, products
from tpkernels.kernels.activations import Activation

Operands = Callable[[int, int], Tensor]  # random matrices of the case's dtype and device
Describe = Callable[..., Work]  # what remains to be said of a case: op, pass, naive, flops, bytes


def passes_of(shape: Shape) -> list[str]:
    """The passes that are worth measuring on this layer."""
    extra = {"fc_up": ["mlp"], "fc_down": ["dgrad_act"]}
    return ["forward", "dgrad", "wgrad", "wgrad_add", *extra.get(shape.layer, [])]


def case_of(shape: Shape, pass_: str, dtype: torch.dtype, device: str) -> Case:
    if pass_ == "mlp":
        return _mlp(shape, dtype, device)

    def normal(rows: int, cols: int) -> Tensor:
        matrix: Tensor = torch.randn(rows, cols, device=device).to(dtype) / cols**0.5
        return matrix

    build = {
        "forward": _forward,
        "dgrad": _dgrad,
        "wgrad": _wgrad,
        "wgrad_add": _wgrad_add,
        "dgrad_act": _dgrad_act,
    }[pass_]
    return build(shape, normal, partial(Work, shape=str(shape), dtype=dtype, device=device))


def _forward(shape: Shape, normal: Operands, describe: Describe) -> Case:
    t, n, k = shape.tokens, shape.out_features, shape.in_features
    x, w = normal(t, k), normal(n, k)
    describe = partial(describe, pass_="forward")
    if shape.layer == "fc_up" and shape.model.gated:
        gate = normal(n, k)
        return Case(
            describe(
                op="swiglu",
                naive="silu(F.linear) * F.linear",
                flops=2 * shape.flops,
                bytes=dtype_bytes(x, t * k + 2 * n * k + t * n),
            ),
            {
                "ours": lambda: (ops.swiglu(x, gate, w),),
                "naive": lambda: (F.silu(F.linear(x, gate)) * F.linear(x, w),),
            },
        )
    traffic = dtype_bytes(x, t * k + n * k + t * n)
    if shape.layer == "fc_up":
        bias = normal(1, n)[0]
        return Case(
            describe(op="linear_gelu", naive="gelu(F.linear)", flops=shape.flops, bytes=traffic),
            {
                "ours": lambda: (ops.linear(x, w, bias, "gelu_tanh"),),
                "naive": lambda: (F.gelu(F.linear(x, w, bias), approximate="tanh"),),
                "addmm_activation": lambda: (torch._addmm_activation(bias, x, w.T, use_gelu=True),),
            },
        )
    return Case(
        describe(op="linear", naive="F.linear", flops=shape.flops, bytes=traffic),
        {"ours": lambda: (ops.linear(x, w),), "naive": lambda: (F.linear(x, w),)},
    )


def _dgrad(shape: Shape, normal: Operands, describe: Describe) -> Case:
    t, n, k = shape.tokens, shape.out_features, shape.in_features
    dy, w = normal(t, n), normal(n, k)
    traffic = dtype_bytes(dy, t * n + n * k + t * k)
    return Case(
        describe(op="linear", pass_="dgrad", naive="dy @ w", flops=shape.flops, bytes=traffic),
        {"ours": lambda: (primitives.dgrad(dy, w),), "naive": lambda: (dy @ w,)},
    )


def _wgrad(shape: Shape, normal: Operands, describe: Describe) -> Case:
    t, n, k = shape.tokens, shape.out_features, shape.in_features
    dy, x = normal(t, n), normal(t, k)
    traffic = dtype_bytes(x, t * n + t * k + n * k)
    return Case(
        describe(op="linear", pass_="wgrad", naive="dy.T @ x", flops=shape.flops, bytes=traffic),
        {"ours": lambda: (primitives.wgrad(dy, x),), "naive": lambda: (dy.T @ x,)},
    )


def _wgrad_add(shape: Shape, normal: Operands, describe: Describe) -> Case:
    """Into an fp32 `main_grad`, against a product and an addition. Each way has a sum of its own."""
    t, n, k = shape.tokens, shape.out_features, shape.in_features
    dy, x = normal(t, n), normal(t, k)

    def into(accumulate: Callable[[Tensor], object]) -> Callable[[], tuple[Tensor]]:
        total = torch.zeros(n, k, dtype=torch.float32, device=x.device)

        def run() -> tuple[Tensor]:
            accumulate(total)
            return (total,)

        return run

    ways = {
        "ours": into(lambda total: primitives.wgrad_accumulate_(total, dy, x)),
        "naive": into(lambda total: total.add_(dy.T @ x)),
    }
    if x.dtype == torch.float32:
        ways["addmm"] = into(lambda total: total.addmm_(dy.T, x))
    elif x.is_cuda and hasattr(torch.ops.aten.addmm, "dtype_out"):
        ways["addmm_fp32"] = into(lambda total: products.addmm_dtype_out(total, dy, x))
    traffic = dtype_bytes(x, t * n + t * k) + 8 * n * k
    return Case(
        describe(op="linear", pass_="wgrad_add", naive="sum += dy.T @ x", flops=shape.flops, bytes=traffic),
        ways,
    )


def _dgrad_act(shape: Shape, normal: Operands, describe: Describe) -> Case:
    """The down-projection's input gradient with the activation's: fc_down of an MLP that is not gated."""
    t, n, k = shape.tokens, shape.out_features, shape.in_features
    dy, w, z = normal(t, n), normal(n, k), normal(t, k)
    activation: Activation = "gelu_tanh"
    traffic = dtype_bytes(dy, t * n + n * k + 2 * t * k)
    return Case(
        describe(op="linear_gelu", pass_="dgrad", naive="dy @ w, gelu'", flops=shape.flops, bytes=traffic),
        {
            "ours": lambda: (primitives.dgrad_act(dy, w, z, activation, False)[0],),
            "naive": lambda: (torch.ops.aten.gelu_backward(dy @ w, z, approximate="tanh"),),
        },
    )


def _mlp(shape: Shape, dtype: torch.dtype, device: str) -> Case:
    """All gradients."""
    t, ffn, hidden = shape.tokens, shape.out_features, shape.in_features
    build, products = Local(dtype, device, compiles=True), 3 * (3 if shape.model.gated else 2)
    case = (build.gated_mlp if shape.model.gated else build.mlp)(t, hidden, ffn)
    traffic = products * dtype.itemsize * (t * hidden + t * ffn + ffn * hidden)
    work = replace(case.work, op="mlp", shape=str(shape), flops=products * shape.flops, bytes=traffic)
    return replace(case, work=work)


def dtype_bytes(tensor: Tensor, elements: int) -> int:
    return tensor.element_size() * elements
