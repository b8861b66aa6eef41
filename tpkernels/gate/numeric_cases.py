"""What `check` computes in the interpreter: each launcher once per form, dtype and activation.

A case calls a launcher on random operands and returns, name by name, what it computed and the exact value, by
float64. Operands lie in NaN, so that reading outside one shows; sizes straddle the interpreter's tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tpkernels.kernels import reference
from tpkernels.kernels.activations import ACTIVATIONS, GATE_OF, Activation, Glu
from tpkernels.kernels.bias_grad import bias_grad, sum_partials
from tpkernels.kernels.cross_entropy import cross_entropy_grad, softmax_statistics
from tpkernels.kernels.dglu import dglu
from tpkernels.kernels.dgrad import dgrad, dgrad_act
from tpkernels.kernels.embedding import embedding_bwd, embedding_fwd
from tpkernels.kernels.footprints import SHORT_NAMES
from tpkernels.kernels.gather_linear import gather_linear_fwd
from tpkernels.kernels.glu import glu_fwd
from tpkernels.kernels.linear import linear_fwd
from tpkernels.kernels.norm import layer_norm_bwd, layer_norm_fwd, rms_norm_bwd, rms_norm_fwd
from tpkernels.kernels.operands import Form
from tpkernels.kernels.reduce import reduce_slots
from tpkernels.kernels.waits import Arrivals
from tpkernels.kernels.wgrad import wgrad, wgrad_accumulate_

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# tokens, in_features, out_features: descriptors want rows of whole 16-byte units, pointers take anything
SIZES: Mapping[Form, tuple[int, int, int]] = {"descriptor": (72, 88, 104), "pointer": (71, 45, 83)}
WAYS: tuple[tuple[Form, torch.dtype], ...] = (("descriptor", BF16), ("pointer", FP16), ("pointer", FP32))

Results = Mapping[str, tuple[Tensor | None, Tensor]]  # what -> (computed, exact)


@dataclass(frozen=True)
class Case:
    name: str  # "dgrad_act/descriptor/bf16/silu", starting with the launcher's name
    run: Callable[[], Results]


def cases() -> Iterator[Case]:
    for form, dtype in WAYS:
        yield from _matmuls(form, dtype)
    yield Case("sum_partials/fp32", partial(_bias_grad, sum_partials, FP32))
    for dtype in (BF16, FP32):
        name = SHORT_NAMES[dtype]
        yield Case(f"bias_grad/{name}", partial(_bias_grad, bias_grad, dtype))
        yield Case(f"reduce_slots/{name}", partial(_reduce_slots, dtype))
        yield Case(f"embedding_fwd/embedding_bwd/{name}", partial(_embedding, dtype))
        yield Case(f"softmax_statistics/cross_entropy_grad/{name}", partial(_cross_entropy, dtype))
        for residual in (False, True):
            way = f"{name}{'/residual' * residual}"
            yield Case(f"rms_norm_fwd/rms_norm_bwd/{way}", partial(_rms_norm, dtype, residual))
            yield Case(f"layer_norm_fwd/layer_norm_bwd/{way}", partial(_layer_norm, dtype, residual))


def random(rows: int, cols: int, dtype: torch.dtype) -> Tensor:
    """A (rows, cols) view into a wider matrix; all around it is NaN."""
    pitch = -(-cols // 8) * 8 + 8  # rows stay 16-byte aligned
    wide = torch.full((rows + 2, pitch), float("nan"), dtype=dtype)
    wide[1 : rows + 1, :cols] = torch.randn(rows, cols)
    return wide[1 : rows + 1, :cols]


def _matmuls(form: Form, dtype: torch.dtype) -> Iterator[Case]:
    way = f"{form}/{SHORT_NAMES[dtype]}"
    for activation in ACTIVATIONS:
        yield Case(f"linear_fwd/{way}/{activation}", partial(_linear, form, dtype, activation))
        run = partial(_gather_linear, form, dtype, activation)
        yield Case(f"gather_linear_fwd/{way}/{activation}", run)
        yield Case(f"dgrad_act/{way}/{activation}", partial(_dgrad_act, form, dtype, activation))
    for kind in GATE_OF:
        yield Case(f"glu_fwd/{way}/{kind}", partial(_glu, form, dtype, kind))
        yield Case(f"dglu/{way}/{kind}", partial(_dglu, form, dtype, kind))
    yield Case(f"dgrad/{way}", partial(_dgrad, form, dtype))
    yield Case(f"wgrad/{way}", partial(_wgrad, form, dtype))
    for into in (FP32, BF16):
        run = partial(_wgrad_accumulate, form, dtype, into)
        yield Case(f"wgrad_accumulate_/{way}/{SHORT_NAMES[into]}", run)


def _weight(rows: int, cols: int, dtype: torch.dtype) -> Tensor:
    return random(rows, cols, dtype).mul_(cols**-0.5)


def _linear(form: Form, dtype: torch.dtype, activation: Activation) -> Results:
    T, K, N = SIZES[form]
    x, w, b = random(T, K, dtype), _weight(N, K, dtype), random(1, N, dtype)[0]
    ours = linear_fwd(x, w, b, activation=activation, keep_z=True, form=form)
    y, z = reference.linear_ref(x.double(), w.double(), b.double(), activation)
    return {"y": (ours.y, y), "z": (ours.z, z)}


def _arrived(chunks: int) -> Arrivals:
    """All chunks are here."""
    flags = torch.full((chunks,), 7, dtype=torch.int32)
    return Arrivals(flags, torch.tensor([7], dtype=torch.int32), torch.zeros(1, dtype=torch.int32))


def _gather_linear(form: Form, dtype: torch.dtype, activation: Activation) -> Results:
    T, K, N = SIZES[form]
    T -= T % 3
    x, w, b = random(T, K, dtype), _weight(N, K, dtype), random(1, N, dtype)[0]
    ours = gather_linear_fwd(
        x, w, b, arrivals=_arrived(3), first_row=T // 3, activation=activation, keep_z=True, form=form
    )
    y, z = reference.gather_linear_ref(x.double(), w.double(), b.double(), activation)
    return {"y": (ours.y, y), "z": (ours.z, z)}


def _glu(form: Form, dtype: torch.dtype, kind: Glu) -> Results:
    T, K, N = SIZES[form]
    x, w_gate, w_up = random(T, K, dtype), _weight(N, K, dtype), _weight(N, K, dtype)
    ours = glu_fwd(x, w_gate, w_up, kind=kind, keep_gu=True, form=form)
    h, g, u = reference.glu_ref(x.double(), w_gate.double(), w_up.double(), kind)
    return {"h": (ours.h, h), "g": (ours.g, g), "u": (ours.u, u)}


def _dgrad(form: Form, dtype: torch.dtype) -> Results:
    T, K, N = SIZES[form]
    dy, w = random(T, N, dtype), _weight(N, K, dtype)
    return {"dx": (dgrad(dy, w, form=form), reference.dgrad_ref(dy.double(), w.double()))}


def _dgrad_act(form: Form, dtype: torch.dtype, activation: Activation) -> Results:
    T, K, N = SIZES[form]
    dy, w, z = random(T, N, dtype), _weight(N, K, dtype), random(T, K, dtype)
    ours = dgrad_act(dy, w, z, activation, bias_grad=True, form=form)
    dz, db = reference.dgrad_act_ref(dy.double(), w.double(), z.double(), activation)
    return {"dz": (ours.dz, dz), "db": (ours.db, db)}


def _dglu(form: Form, dtype: torch.dtype, kind: Glu) -> Results:
    T, K, N = SIZES[form]
    dy, w, g, u = random(T, N, dtype), _weight(N, K, dtype), random(T, K, dtype), random(T, K, dtype)
    ours = dglu(dy, w, g, u, kind=kind, emit_h=True, form=form)
    dg, du, h = reference.dglu_ref(dy.double(), w.double(), g.double(), u.double(), kind)
    return {"dg": (ours.dg, dg), "du": (ours.du, du), "h": (ours.h, h)}


def _wgrad(form: Form, dtype: torch.dtype) -> Results:
    T, K, N = SIZES[form]
    dy, x = random(T, N, dtype), random(T, K, dtype)
    return {"dw": (wgrad(dy, x, form=form), reference.wgrad_ref(dy.double(), x.double()))}


def _wgrad_accumulate(form: Form, dtype: torch.dtype, into: torch.dtype) -> Results:
    T, K, N = SIZES[form]
    dy, x, main_grad = random(T, N, dtype), random(T, K, dtype), random(N, K, into)
    exact = main_grad.double()
    reference.wgrad_accumulate_ref_(exact, dy.double(), x.double())
    wgrad_accumulate_(main_grad, dy, x, form=form)
    return {"main_grad": (main_grad, exact)}


def _bias_grad(launcher: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Results:
    dy = random(71, 45, dtype)
    return {"db": (launcher(dy), reference.bias_grad_ref(dy.double()))}


def _reduce_slots(dtype: torch.dtype) -> Results:
    slots, bias = random(3 * 26, 45, dtype).unflatten(0, (3, 26)), random(1, 45, dtype)[0]
    y = reduce_slots(slots, bias, arrivals=_arrived(6))
    return {"y": (y, reference.reduce_slots_ref(slots.double(), bias.double()))}


def _norm_operands(dtype: torch.dtype, with_residual: bool) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """x, residual, dy and what reaches the sum past the norm."""
    x, residual, dy, past = (random(70, 45, dtype) for _ in range(4))
    return x.add_(0.5), residual if with_residual else None, dy, past


def _rms_norm(dtype: torch.dtype, with_residual: bool) -> Results:
    x, residual, dy, past = _norm_operands(dtype, with_residual)
    weight = random(1, 45, dtype)[0]
    ours = rms_norm_fwd(x, weight, residual=residual)
    # the rounded sum is what the rest is computed from
    y, _, rstd = reference.rms_norm_ref(ours.summed.double(), weight.double())
    grads = rms_norm_bwd(dy, ours.summed, weight, ours.rstd, dsummed=past)
    dx, dweight = reference.rms_norm_bwd_ref(
        dy.double(), ours.summed.double(), weight.double(), rstd.double(), past.double()
    )
    return {
        "summed": (ours.summed, x.double() if residual is None else x.double() + residual.double()),
        "y": (ours.y, y),
        "rstd": (ours.rstd, rstd),
        "dx": (grads.dx, dx),
        "dweight": (grads.dweight, dweight),
    }


def _layer_norm(dtype: torch.dtype, with_residual: bool) -> Results:
    x, residual, dy, past = _norm_operands(dtype, with_residual)
    weight, bias = random(1, 45, dtype)[0], random(1, 45, dtype)[0]
    ours = layer_norm_fwd(x, weight, bias, residual=residual)
    assert ours.mean is not None
    y, _, mean, rstd = reference.layer_norm_ref(ours.summed.double(), weight.double(), bias.double())
    grads = layer_norm_bwd(dy, ours.summed, weight, ours.mean, ours.rstd, dsummed=past)
    exact = reference.layer_norm_bwd_ref(
        dy.double(), ours.summed.double(), weight.double(), mean.double(), rstd.double(), past.double()
    )
    return {
        "summed": (ours.summed, x.double() if residual is None else x.double() + residual.double()),
        "y": (ours.y, y),
        "mean": (ours.mean, mean),
        "rstd": (ours.rstd, rstd),
        "dx": (grads.dx, exact[0]),
        "dweight": (grads.dweight, exact[1]),
        "dbias": (grads.dbias, exact[2]),
    }


def _embedding(dtype: torch.dtype) -> Results:
    """One of three ranks, with ids of the others before and after its own."""
    weight, dy = random(26, 45, dtype), random(71, 45, dtype)
    ids = torch.randint(3 * 26, (71,))
    return {
        "y": (embedding_fwd(ids, weight, first_id=26), reference.embedding_ref(ids, weight.double(), 26)),
        "dweight": (
            embedding_bwd(dy, ids, rows=26, first_id=26),
            reference.embedding_bwd_ref(dy.double(), ids, 26, 26),
        ),
    }


def _cross_entropy(dtype: torch.dtype) -> Results:
    """One of three ranks, with some padding and ignored rows."""
    logits, dloss = random(40, 83, dtype), torch.randn(40)
    logits[:, 76:] = float("nan")
    target = torch.randint(-20, 3 * 83, (40,))
    ours = softmax_statistics(logits, target, columns=76, first_id=83)
    exact = reference.softmax_statistics_ref(logits.double(), target, 76, 83)
    exact[0].clamp_(min=torch.finfo(FP32).min)
    grad = cross_entropy_grad(
        logits, target, ours[0], ours[1] + 1, dloss, columns=76, first_id=83, on_target=0.9, off_target=0.001
    )
    exact_grad = reference.cross_entropy_grad_ref(
        logits.double(), target, exact[0], exact[1] + 1, dloss.double(), 76, 83, 0.9, 0.001
    )
    return {
        "maximum": (ours[0], exact[0]),
        "total": (ours[1], exact[1]),
        "picked": (ours[2], exact[2]),
        "summed": (ours[3], exact[3]),
        "dlogits": (grad, exact_grad),
    }
