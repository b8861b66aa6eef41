"""Every op as a case: how to call it, what it means in plain torch, and the shapes of its operands."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from tpkernels import ops

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

    def operands(self, leading: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        x = torch.randn(*leading, K, device=device).to(dtype)
        scaled = [torch.randn(shape, device=device) / shape[-1] ** 0.5 for shape in self.shapes]
        return [x, *(parameter.to(dtype) for parameter in scaled)]


def _linear(activation: str | None) -> Case:
    return Case(
        lambda x, w, b: ops.linear(x, w, b, activation),
        lambda x, w, b: ACT[activation](F.linear(x, w, b)),
        ((N, K), (N,)),
    )


def _mlp(activation: str) -> Case:
    return Case(
        lambda x, wu, bu, wd, bd: ops.mlp(x, wu, bu, wd, bd, activation=activation),
        lambda x, wu, bu, wd, bd: F.linear(ACT[activation](F.linear(x, wu, bu)), wd, bd),
        ((FFN, K), (FFN,), (N, FFN), (N,)),
    )


def _gated(gate: str, kind: str) -> dict[str, Case]:
    return {
        kind: Case(
            lambda x, wg, wu: ops.swiglu(x, wg, wu, kind=kind),
            lambda x, wg, wu: ACT[gate](F.linear(x, wg)) * F.linear(x, wu),
            ((N, K), (N, K)),
        ),
        f"mlp_{kind}": Case(
            lambda x, wg, wu, wd, bd: ops.mlp(x, wu, None, wd, bd, w_gate=wg, activation=kind),
            lambda x, wg, wu, wd, bd: F.linear(ACT[gate](F.linear(x, wg)) * F.linear(x, wu), wd, bd),
            ((FFN, K), (FFN, K), (N, FFN), (N,)),
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


def gradients(function: Callable[..., Tensor], operands: list[Tensor], dy: Tensor) -> list[Tensor]:
    """y, and the gradient of each operand for the gradient `dy` of y."""
    leaves = [operand.detach().clone().requires_grad_() for operand in operands]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))]
