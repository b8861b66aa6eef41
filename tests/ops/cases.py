"""Every op as a case: how to call it, what it means in plain torch, and the shapes of its operands."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tpkernels import Recipe, ops

ACT = {
    None: lambda z: z,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
    "relu2": lambda z: F.relu(z).square(),
}
K, FFN, N = 24, 40, 16


@dataclass(frozen=True)
class Case:
    op: Callable[..., Tensor]
    plain: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...]  # of the parameters; x comes first and has K features
    out: int = N

    def operands(
        self, leading: tuple[int, ...], dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> list[Tensor]:
        x = torch.randn(*leading, K, device=device).to(dtype)
        scaled = [torch.randn(shape, device=device) / (shape[-1] ** 0.5) for shape in self.shapes]
        return [x, *(parameter.to(dtype) for parameter in scaled)]

    def in_fp8(self, recipe: object) -> "Case":
        return replace(self, op=partial(self.op, quantize=recipe))


def _linear(activation: str | None) -> Case:
    return Case(
        lambda x, w, b, **options: ops.linear(x, w, b, activation, **options),
        lambda x, w, b: ACT[activation](F.linear(x, w, b)),
        ((N, K), (N,)),
    )


def _mlp(activation: str) -> Case:
    return Case(
        lambda x, wu, bu, wd, bd, **options: ops.mlp(x, wu, bu, wd, bd, activation=activation, **options),
        lambda x, wu, bu, wd, bd: F.linear(ACT[activation](F.linear(x, wu, bu)), wd, bd),
        ((FFN, K), (FFN,), (N, FFN), (N,)),
    )


def _gated(gate: str, kind: str) -> dict[str, Case]:
    return {
        kind: Case(
            lambda x, wg, wu, **options: ops.swiglu(x, wg, wu, kind=kind, **options),
            lambda x, wg, wu: ACT[gate](F.linear(x, wg)) * F.linear(x, wu),
            ((N, K), (N, K)),
        ),
        f"mlp_{kind}": Case(
            lambda x, wg, wu, wd, bd, **options: ops.mlp(
                x, wu, None, wd, bd, w_gate=wg, activation=kind, **options
            ),
            lambda x, wg, wu, wd, bd: F.linear(ACT[gate](F.linear(x, wg)) * F.linear(x, wu), wd, bd),
            ((FFN, K), (FFN, K), (N, FFN), (N,)),
        ),
    }


NORMS = {
    "rms_norm": Case(ops.rms_norm, lambda x, w: F.rms_norm(x, w.shape, w, 1e-5), ((K,),), K),
    "layer_norm": Case(ops.layer_norm, lambda x, w, b: F.layer_norm(x, w.shape, w, b, 1e-5), ((K,), (K,)), K),
    "layer_norm_without_bias": Case(
        ops.layer_norm, lambda x, w: F.layer_norm(x, w.shape, w, None, 1e-5), ((K,),), K
    ),
    "layer_norm_eps": Case(
        partial(ops.layer_norm, eps=0.5), lambda x, w, b: F.layer_norm(x, w.shape, w, b, 0.5), ((K,), (K,)), K
    ),
}
CASES = {
    **{f"linear_{activation}": _linear(activation) for activation in ACT},
    "linear_without_bias": Case(ops.linear, F.linear, ((N, K),)),
    **{f"mlp_{activation}": _mlp(activation) for activation in ACT if activation},
    "mlp_without_biases": Case(
        lambda x, wu, wd: ops.mlp(x, wu, None, wd, None),
        lambda x, wu, wd: F.linear(F.gelu(F.linear(x, wu), approximate="tanh"), wd),
        ((FFN, K), (N, FFN)),
    ),
    **_gated("silu", "swiglu"),
    **_gated("gelu", "geglu"),
    **_gated("gelu_tanh", "geglu_tanh"),
}
# one of each kind, plain and in fp8, which differ in what they save and compute again
SOME = ["linear_None", "linear_gelu", "mlp_gelu_tanh", "swiglu", "mlp_swiglu"]
RECIPES = [Recipe.rowwise(), Recipe.rowwise(wgrad="fp8"), Recipe.blockwise()]
EACH_KIND = [pytest.param((CASES | NORMS)[name], id=name) for name in (*SOME, "rms_norm", "layer_norm")] + [
    pytest.param(
        CASES[name].in_fp8(recipe),
        id=f"{name}, {recipe}",
        marks=() if i % len(RECIPES) == j else pytest.mark.sweep,
    )
    for i, name in enumerate(SOME)
    for j, recipe in enumerate(RECIPES)
]


def gradients(function: Callable[..., Tensor], operands: list[Tensor], dy: Tensor) -> list[Tensor]:
    """y, and the gradient of each operand for the gradient `dy` of y."""
    leaves = [operand.detach().clone().requires_grad_() for operand in operands]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))]
