"""Records of the matrix products of linear layers. T tokens, N out_features, K in_features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tpkernels.dispatch import one_pass
from tpkernels.dispatch.record import Layer, Library, Primitive, launcher, writing
from tpkernels.kernels.activations import (
    GATE_OF,
    Activation,
    Glu,
    act_grad_into,
    act_into,
)
from tpkernels.kernels.operands import DTYPES
from tpkernels.kernels.reference import (
    bias_grad_ref,
    dglu_ref,
    dgrad_act_ref,
    dgrad_pairs_ref,
    dgrad_ref,
    glu_ref,
    linear_ref,
    wgrad_accumulate_ref_,
    wgrad_ref,
)
from tpkernels.tp_invariance import segments_of_op

if TYPE_CHECKING:
    from tpkernels.dispatch.candidates import TuneKey
    from tpkernels.kernels.target import Target


def sums_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32 or wider."""
    return torch.promote_types(dtype, torch.float32)


def _linear_into(
    out: Sequence[Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: Activation,
    keep_z: bool,
) -> None:
    """Without z the activation is applied in place. out: y, and z if it is kept and not y"""
    y, z = out[0], out[-1]
    one_pass.product_into(z, x, weight, bias)
    act_into(y, z, activation)


def _addmm_activation(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    activation: Activation,
    keep_z: bool,
    *,
    out: Sequence[Tensor | None] = (None,),
) -> tuple[Tensor, None]:
    """With the activation in cuBLASLt's epilogue."""
    return torch._addmm_activation(bias, x, weight.T, use_gelu=activation == "gelu_tanh", out=out[0]), None


def _addmm_activation_fits(key: TuneKey, target: Target) -> bool:
    if not hasattr(torch, "_addmm_activation"):
        return False
    match key.options:
        case ("relu", "bias"):
            return True
        case ("gelu_tanh", "bias"):
            return target.backend == "cuda"  # elsewhere it is the erf form
    return False


def _linear_sample(layer: Layer) -> tuple[Any, ...]:
    bias = layer.tensor(layer.out_features) if layer.bias else None
    keep_z = layer.training and layer.activation != "none"
    return layer.x(), layer.weight(), bias, layer.activation, keep_z


linear = Primitive(
    "linear(Tensor x, Tensor weight, Tensor? bias, str activation, bool keep_z) -> y, z if keep_z",
    linear_ref,
    launcher("linear", "linear_fwd", "activation", "keep_z"),
    _linear_sample,
    "linear",
    library=(
        Library("torch", linear_ref, into=_linear_into),
        Library(
            "addmm_activation", _addmm_activation, _addmm_activation_fits, into=writing(_addmm_activation)
        ),
        one_pass.LINEAR,
    ),
)


def _glu_into(
    out: Sequence[Tensor], x: Tensor, w_gate: Tensor, w_up: Tensor, kind: Glu, keep_gu: bool
) -> None:
    """out: h, and g and u if they are kept; else h is computed where g is, and u beside"""
    h, g, u = out if keep_gu else (out[0], out[0], None)
    torch.mm(x, w_gate.t(), out=g)
    u = torch.mm(x, w_up.t()) if u is None else torch.mm(x, w_up.t(), out=u)
    act_into(h, g, GATE_OF[kind])
    h.mul_(u)


glu = Primitive(
    "glu(Tensor x, Tensor w_gate, Tensor w_up, str kind, bool keep_gu) -> h, g if keep_gu, u if keep_gu",
    glu_ref,
    launcher("glu", "glu_fwd", "kind", "keep_gu"),
    lambda layer: (layer.x(), layer.weight(), layer.weight(), layer.glu, layer.training),
    "glu",
    library=(Library("torch", glu_ref, into=_glu_into), one_pass.GLU, one_pass.WIDE_GLU),
)


dgrad = Primitive(
    "dgrad(Tensor dy, Tensor weight) -> dx",
    dgrad_ref,
    launcher("dgrad", "dgrad"),
    lambda layer: (layer.dy(), layer.weight()),
    "dgrad",
    library=(Library("torch", dgrad_ref, into=lambda out, dy, weight: torch.mm(dy, weight, out=out[0])),),
)


dgrad_pairs = Primitive(
    "dgrad_pairs(Tensor dy, Tensor weight, Tensor dy2, Tensor weight2) -> dx",
    dgrad_pairs_ref,
    launcher("dgrad", "dgrad"),
    lambda layer: (layer.dy(), layer.weight(), layer.dy(), layer.weight()),
    "dgrad",
    library=(
        Library(
            "torch",
            dgrad_pairs_ref,
            into=lambda out, dy, w, dy2, w2: torch.mm(dy, w, out=out[0]).addmm_(dy2, w2),
        ),
    ),
)


def _dgrad_act_into(
    out: Sequence[Tensor], dy: Tensor, weight: Tensor, z: Tensor, activation: Activation, bias_grad: bool
) -> None:
    """out: dz, where dy weight is computed, and db if it is asked for"""
    dz = torch.mm(dy, weight, out=out[0])
    act_grad_into(dz, dz, z, activation)
    if bias_grad:
        torch.sum(dz, 0, dtype=out[1].dtype, out=out[1])


dgrad_act = Primitive(
    "dgrad_act(Tensor dy, Tensor weight, Tensor z, str activation, bool bias_grad) -> dz, db if bias_grad",
    dgrad_act_ref,
    launcher("dgrad", "dgrad_act", "bias_grad"),
    lambda layer: (layer.dy(), layer.weight(), layer.x(), layer.activation, layer.bias),
    "dgrad",
    library=(Library("torch", dgrad_act_ref, into=_dgrad_act_into), one_pass.DGRAD_ACT),
)


def _dglu_into(out: Sequence[Tensor], dy: Tensor, weight: Tensor, g: Tensor, u: Tensor, kind: Glu) -> None:
    """out: dg, du, where dy weight is computed, and h, where f(g) is"""
    (dg, du, gate), activation = out, GATE_OF[kind]
    dh = torch.mm(dy, weight, out=du)
    act_into(gate, g, activation)
    torch.mul(dh, u, out=dg)
    act_grad_into(dg, dg, g, activation)
    du.mul_(gate)
    gate.mul_(u)


dglu = Primitive(
    "dglu(Tensor dy, Tensor weight, Tensor g, Tensor u, str kind) -> dg, du, h",
    dglu_ref,
    launcher("dglu", "dglu", "kind", always={"emit_h": True}),
    lambda layer: (layer.dy(), layer.weight(), layer.x(), layer.x(), layer.glu),
    "dglu",
    library=(Library("torch", dglu_ref, into=_dglu_into), one_pass.DGLU),
)


wgrad = Primitive(
    "wgrad(Tensor dy, Tensor x) -> dw",
    wgrad_ref,
    launcher("wgrad", "wgrad"),
    lambda layer: (layer.dy(), layer.x()),
    "wgrad",
)


def _addmm_(main_grad: Tensor, dy: Tensor, x: Tensor) -> None:
    """One dtype, one product."""
    main_grad.addmm_(dy.T, x)


def _addmm_fits(key: TuneKey, target: Target) -> bool:
    return key.options == (str(key.dtype).removeprefix("torch."),)


def addmm_dtype_out(main_grad: Tensor, dy: Tensor, x: Tensor) -> None:
    """16-bit operands into fp32 in one product."""
    torch.ops.aten.addmm.dtype_out(main_grad, dy.T, x, main_grad.dtype, out=main_grad)


def _addmm_dtype_out_fits(key: TuneKey, target: Target) -> bool:
    return (
        key.options == ("float32",)
        and key.dtype.itemsize == 2
        and target.backend == "cuda"
        and hasattr(torch.ops.aten.addmm, "dtype_out")
    )


def _wgrad_accumulate_sample(layer: Layer) -> tuple[Any, ...]:
    weight = layer.weight()
    return weight.new_empty(weight.shape, dtype=torch.float32), layer.dy(), layer.x()


wgrad_accumulate_ = Primitive(
    "wgrad_accumulate_(Tensor(a!) main_grad, Tensor dy, Tensor x) -> main_grad",
    wgrad_accumulate_ref_,
    launcher("wgrad", "wgrad_accumulate_"),
    _wgrad_accumulate_sample,
    "wgrad",
    library=(
        Library("addmm_", _addmm_, _addmm_fits),
        Library("addmm_dtype_out", addmm_dtype_out, _addmm_dtype_out_fits),
    ),
)


# the sum over tokens, in fp32; bound by memory either way: there is nothing to choose
bias_grad = Primitive(
    "bias_grad(Tensor dy) -> db",
    bias_grad_ref,
    launcher("bias_grad", "bias_grad"),
    lambda layer: (layer.dy(),),
    # torch's sum over rows takes an order that depends on how many columns there are
    lambda dy: bool(segments_of_op()) and dy.dtype in DTYPES,
)

PRODUCTS: dict[str, Primitive[..., Any]] = {
    record.name: record
    for record in (linear, glu, dgrad, dgrad_pairs, dgrad_act, dglu, wgrad, wgrad_accumulate_)
}
