"""RMSNorm and LayerNorm over the features of each token, as differentiable operators.

T tokens, K features; sums over the features of a token, in fp32 or wider:

    x    (T, K)      weight, bias  (K,)

    forward   mean = Σ x / K,  rstd = 1 / sqrt(Σ (x - mean)² / K + eps)        mean is 0 for RMSNorm
              n = (x - mean) * rstd,  y = n * weight + bias                    one kernel
    dx        rstd * (dn - n * Σ (dn * n) / K - Σ dn / K),  dn = dy * weight   the last for LayerNorm only
    dweight   Σ over tokens of dy * n,    dbias = Σ over tokens of dy          in fp32, rounded once

Parameters may be fp32 where x is narrower; y is in the dtype of x, in autocast regions too, where nothing is
cast: the sums are wide anyway. The autograd function: `token_norm`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tpkernels.ops.inputs import computed, features_of, in_forward_mode, like_tokens, tokens_of
from tpkernels.ops.tensor_parallel.parallel import ALONE
from tpkernels.ops.token_norm import Norm, TokenNorm, token_norm
from tpkernels.tp_invariance import given_or_default


def rms_norm(
    x: Tensor,
    weight: Tensor,
    *,
    eps: float = 1e-5,
    group: ProcessGroup | None = None,
    tp_invariant: int | None = None,
) -> Tensor:
    """Normalize x by its root mean square: x / rms(x) * weight.

    x: (..., features)
    weight: (features,), in the dtype of x or fp32
    group: its ranks have the other tokens (dimension 0); the gradient of weight is summed over them
    tp_invariant: segments of TP-invariance; None: as `tpkernels.tp_invariant` says
    """
    return _norm("rms_norm", x, weight, None, eps, group, tp_invariant)


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    group: ProcessGroup | None = None,
    tp_invariant: int | None = None,
) -> Tensor:
    """Normalize x to zero mean and unit variance; return it times weight plus bias.

    x: (..., features)
    weight, bias: (features,), in the dtype of x or fp32
    group: its ranks have the other tokens (dimension 0); gradients of weight and bias are summed over them
    tp_invariant: segments of TP-invariance; None: as `tpkernels.tp_invariant` says
    """
    return _norm("layer_norm", x, weight, bias, eps, group, tp_invariant)


def _norm(
    kind: Norm,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    group: ProcessGroup | None,
    tp_invariant: int | None,
) -> Tensor:
    segments = given_or_default(tp_invariant)
    features = features_of(kind, x)
    if not x.is_floating_point():
        raise TypeError(f"{kind}: expected floating-point tensors, got x in {x.dtype}")
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None:
            _check_parameter(kind, name, parameter, x, features)
    tokens, recorded = tokens_of(x), torch.is_grad_enabled() or in_forward_mode()
    if segments or (recorded and group is not None):
        y = token_norm(kind, x, tokens, weight, bias, eps, group if recorded else None, segments)
    else:
        y = computed(TokenNorm, kind, tokens, weight, bias, eps, 0, ALONE)
    return like_tokens(y, x)


def _check_parameter(op: str, name: str, parameter: Tensor, x: Tensor, features: int) -> None:
    if (  # the usual case costs these looks
        parameter.shape == (features,)
        and parameter.dtype in (x.dtype, torch.float32)
        and ((x.is_cpu and parameter.is_cpu) or parameter.device == x.device)
    ):
        return
    if tuple(parameter.shape) != (features,):
        raise ValueError(
            f"{op}: expected {name} ({features},) for x {tuple(x.shape)}, got {tuple(parameter.shape)}"
        )
    if parameter.dtype not in (x.dtype, torch.float32):
        raise TypeError(
            f"{op}: expected {name} in {x.dtype} like x, or in torch.float32, got {parameter.dtype}; "
            "cast one of them"
        )
    if parameter.device != x.device:
        raise ValueError(
            f"{op}: expected one device, got x on {x.device} and {name} on {parameter.device}; move one"
        )
