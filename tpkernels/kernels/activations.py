"""Activations between linear layers: what their names mean, and the torch oracles.

With s = sigmoid and Φ, φ the distribution and density of the standard normal:

    name        f(z)            f'(z)
    none        z               1
    gelu        z Φ(z)          Φ(z) + z φ(z)
    gelu_tanh   z s(v)          s(v) + z s(v) (1 - s(v)) v'(z)        v(z) = 2 sqrt(2/π) (z + 0.044715 z³)
    silu        z s(z)          s(z) + z s(z) (1 - s(z))
    relu        max(z, 0)       1 where z > 0, else 0
    relu2       max(z, 0)²      2 max(z, 0)

A gated unit (GLU) is f(g) * u with f = silu (`swiglu`) or gelu (`geglu`, `geglu_tanh`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tpkernels.kernels.activation_names import ACTIVATIONS as ACTIVATIONS
from tpkernels.kernels.activation_names import GATE_OF as GATE_OF
from tpkernels.kernels.activation_names import Activation as Activation
from tpkernels.kernels.activation_names import Glu as Glu

_nn: Any = torch._C._nn  # what `functional` calls; takes `out`, and is quicker than an overload
# found once: to find an overload takes a tenth of a tiny product's time
_gelu_backward = torch.ops.aten.gelu_backward.default
_silu_backward = torch.ops.aten.silu_backward.default
_gelu_backward_out = torch.ops.aten.gelu_backward.grad_input
_silu_backward_out = torch.ops.aten.silu_backward.grad_input


def require_activation(launcher: str, activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"{launcher}: expected an activation of {', '.join(ACTIVATIONS)}; got {activation!r}"
        )


def require_glu(launcher: str, kind: str) -> None:
    if kind not in GATE_OF:
        raise ValueError(f"{launcher}: expected a gated unit of {', '.join(GATE_OF)}; got {kind!r}")


def act_ref(z: Tensor, activation: Activation) -> Tensor:
    """f(z) by torch, in the dtype of z."""
    match activation:
        case "none":
            return z
        case "gelu":
            return functional.gelu(z)
        case "gelu_tanh":
            return functional.gelu(z, approximate="tanh")
        case "silu":
            return functional.silu(z)
        case "relu":
            return functional.relu(z)
        case "relu2":
            return functional.relu(z).square()


def act_into(y: Tensor, z: Tensor, activation: Activation) -> None:
    """y = f(z), with the bits of `act_ref`; y may be z."""
    match activation:
        case "none":
            if y is not z:
                y.copy_(z)
        case "gelu":
            _nn.gelu(z, out=y)
        case "gelu_tanh":
            _nn.gelu(z, approximate="tanh", out=y)
        case "silu":
            _nn.silu(z, out=y)
        case "relu" | "relu2":
            torch.clamp_min(z, 0, out=y)
            if activation == "relu2":
                y.square_()


def act_grad_into(dz: Tensor, dy: Tensor, z: Tensor, activation: Activation) -> None:
    """dz = dy f'(z), with the bits of `act_grad_ref` where nothing is recorded; dz may be dy."""
    match activation:
        case "none":
            if dz is not dy:
                dz.copy_(dy)
        case "gelu":
            _gelu_backward_out(dy, z, grad_input=dz)
        case "gelu_tanh":
            _gelu_backward_out(dy, z, approximate="tanh", grad_input=dz)
        case "silu":
            _silu_backward_out(dy, z, grad_input=dz)
        case "relu":
            torch.mul(dy, z > 0, out=dz)
        case "relu2":
            torch.mul(dy, 2, out=dz).mul_(functional.relu(z))


def act_grad_ref(dy: Tensor, z: Tensor, activation: Activation) -> Tensor:
    """dy f'(z) by torch's own backward formulas, in the dtype of z."""
    dz: Tensor
    match activation:
        case "none":
            dz = dy
        case "gelu":
            dz = _gelu_backward(dy, z)
        case "gelu_tanh":
            dz = _gelu_backward(dy, z, approximate="tanh")
        case "silu" if torch.is_grad_enabled():  # aten's has no derivative
            s = z.sigmoid()
            dz = dy * s * (1 + z * (1 - s))
        case "silu":
            dz = _silu_backward(dy, z)
        case "relu":
            dz = dy * (z > 0)
        case "relu2":
            dz = dy * 2 * functional.relu(z)
    return dz
