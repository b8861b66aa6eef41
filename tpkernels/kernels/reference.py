"""A torch oracle for each launcher: the same tensors in, the same tensors out, plain torch in between.

They are what a launcher must equal in the dtype it is given (in float64: the truth that tests compare with),
and what runs where there is no GPU. They need no Triton.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tpkernels.kernels.activations import GATE_OF, Activation, Glu, act_grad_ref, act_ref


def linear_ref(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: Activation = "none"
) -> tuple[Tensor, Tensor]:
    """(y, z) of `linear_fwd`."""
    z = functional.linear(x, weight, bias)
    return act_ref(z, activation), z


def glu_ref(x: Tensor, w_gate: Tensor, w_up: Tensor, kind: Glu = "swiglu") -> tuple[Tensor, Tensor, Tensor]:
    """(h, g, u) of `glu_fwd`."""
    g, u = functional.linear(x, w_gate), functional.linear(x, w_up)
    return act_ref(g, GATE_OF[kind]) * u, g, u


def dgrad_ref(dy: Tensor, weight: Tensor) -> Tensor:
    """dx of `dgrad`."""
    return dy @ weight


def dgrad_act_ref(dy: Tensor, weight: Tensor, z: Tensor, activation: Activation) -> tuple[Tensor, Tensor]:
    """(dz, db) of `dgrad_act`; the bias gradient is summed in the dtype given, at least fp32."""
    dz = act_grad_ref(dy @ weight, z, activation)
    return dz, bias_grad_ref(dz)


def dglu_ref(
    dy: Tensor, weight: Tensor, g: Tensor, u: Tensor, kind: Glu = "swiglu"
) -> tuple[Tensor, Tensor, Tensor]:
    """(dg, du, h) of `dglu`."""
    dh, gate = dy @ weight, act_ref(g, GATE_OF[kind])
    return act_grad_ref(dh * u, g, GATE_OF[kind]), dh * gate, gate * u


def wgrad_ref(dy: Tensor, x: Tensor) -> Tensor:
    """dw of `wgrad`."""
    return dy.T @ x


def wgrad_accumulate_ref_(main_grad: Tensor, dy: Tensor, x: Tensor) -> None:
    """What `wgrad_accumulate_` does to main_grad."""
    wider = torch.promote_types(main_grad.dtype, torch.float32)
    main_grad += dy.T.to(wider) @ x.to(wider)


def bias_grad_ref(dy: Tensor) -> Tensor:
    """db of `bias_grad`: the sum over tokens, in fp32 or wider."""
    return dy.sum(0, dtype=torch.promote_types(dy.dtype, torch.float32))
