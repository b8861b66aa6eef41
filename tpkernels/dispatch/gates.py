"""A gate f(g) * u of two given tensors, as primitives and their records.

T tokens, K features. Both are bound by memory, over which torch passes several times and a kernel once, so
nothing is timed.
"""

from __future__ import annotations

from torch import Tensor

from tpkernels.dispatch.primitives import primitive
from tpkernels.dispatch.record import Primitive, launcher
from tpkernels.kernels.activations import GATE_OF, Activation, Glu, act_grad_ref, act_ref
from tpkernels.kernels.operands import DTYPES


def _activate(g: Tensor, u: Tensor, activation: Activation) -> Tensor:
    return act_ref(g, activation) * u


def _glu_grad(dh: Tensor, g: Tensor, u: Tensor, kind: Glu) -> tuple[Tensor, Tensor]:
    """The gradients of g and u in f(g) * u -> (dg, du)."""
    gate = GATE_OF[kind]
    return act_grad_ref(dh * u, g, gate), dh * act_ref(g, gate)


# (T, K): f(g) * u
activate = primitive(
    Primitive(
        "activate(Tensor g, Tensor u, str activation) -> h",
        _activate,
        launcher("elementwise", "activate", "activation"),
        lambda layer: (layer.x(), layer.x(), GATE_OF[layer.glu]),
        lambda g, *_: g.dtype in DTYPES,
    )
)

# (T, K) each: the gradients of g and u
glu_grad = primitive(
    Primitive(
        "glu_grad(Tensor dh, Tensor g, Tensor u, str kind) -> dg, du",
        _glu_grad,
        launcher("elementwise", "glu_grad", "kind", gives=("dg", "du")),
        lambda layer: (layer.x(), layer.x(), layer.x(), layer.glu),
        lambda dh, *_: dh.dtype in DTYPES,
    )
)
