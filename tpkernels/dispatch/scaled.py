"""Records of what is computed in fp8. T tokens, N out_features, K in_features; see `kernels.scaled`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from tpkernels.dispatch.record import Layer, Library, Primitive, launcher, writing
from tpkernels.kernels.activations import Activation, act_into, act_ref
from tpkernels.kernels.operands import DTYPES
from tpkernels.kernels.recipe import BLOCK, Format, Scaling
from tpkernels.kernels.scaled import dequantize_ref, empty_words, halves_of, quantize_ref

if TYPE_CHECKING:
    from tpkernels.dispatch.candidates import TuneKey
    from tpkernels.kernels.target import Target

Wide = Literal["bfloat16", "float16", "float32", "float64"]
DTYPE: Mapping[Wide, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}


def _result(x: Tensor, dtype: Wide) -> torch.dtype:
    """Return the dtype of a result; of an oracle, which is given float64, that."""
    return torch.float64 if x.dtype == torch.float64 else DTYPE[dtype]


def _quantize(
    x: Tensor,
    u: Tensor | None,
    activation: Activation,
    format: Format,
    scaling: Scaling,
    power_of_two: bool,
    square: bool,
) -> Tensor:
    """The words of f(x), or of f(x) * u, which is in fp32 or wider."""
    if activation != "none" or u is not None:
        x = act_ref(x.to(torch.promote_types(x.dtype, torch.float32)), activation)
        x = x if u is None else x * u
    return quantize_ref(x, format, scaling, power_of_two, square)


quantize = Primitive(
    "quantize(Tensor x, Tensor? u, str activation, str format, str scaling, bool power_of_two, bool square) "
    "-> words",
    _quantize,
    launcher("quantize", "quantize", "activation", "format", "scaling", "power_of_two", "square"),
    lambda layer: (layer.x(), None, layer.activation, layer.format, layer.scaling, False, layer.square),
    lambda x, *_: x.dtype in DTYPES,
    fake=lambda x, u, activation, format, scaling, power_of_two, square: empty_words(
        x.shape[0], x.shape[1], scaling, x.device
    ),
)


def _dequantize(data: Tensor, scale: Tensor, dtype: Wide) -> Tensor:
    """data * scale, rounded to dtype."""
    return dequantize_ref(data, scale, _result(data, dtype))


def _dequantize_sample(layer: Layer) -> tuple[Any, ...]:
    scaled = layer.scaled(layer.tokens, layer.in_features, layer.format)
    return scaled.data, scaled.scale, "bfloat16"


dequantize = Primitive(
    "dequantize(Tensor data, Tensor scale, str dtype) -> x",
    _dequantize,
    launcher("dequantize", "dequantize", "dtype"),
    _dequantize_sample,
    lambda data, scale, dtype: dtype != "float64",
)


def _scaled_linear(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    activation: Activation,
    keep_z: bool,
    dtype: Wide,
    fast_accumulate: bool,
    *,
    out: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor | None]:
    """y = act(z), z = x̂ ŵᵀ + bias -> (y, z), with x̂ = x * x_scale and ŵ = weight * w_scale.

    x_scale, w_scale: (T, S), (N, S), as of `Scaled`; with scales of blocks w_scale may be (N / 128, S), one
        row for each 128 of weight
    fast_accumulate: sums may have as few bits as tensor cores have; False: no more than 128 of depth are
        summed so
    out: y, and z if it is kept and not y
    Sums are in fp32, and rounded to dtype once.
    """
    into = _result(x, dtype)
    z = _wide_z(x, weight, x_scale, w_scale, bias, into)
    if not out:
        y = act_ref(z, activation).to(into)
        return y, (y if activation == "none" else z.to(into)) if keep_z else None
    if len(out) == 2:
        out[1].copy_(z)
    act_into(z, z, activation)
    return out[0].copy_(z), out[-1] if keep_z else None


def _each_row(w_scale: Tensor, weight: Tensor) -> Tensor:
    """The scales of each row of weight, of which 128 may share them."""
    rows = weight.shape[0]
    return w_scale if w_scale.shape[0] == rows else w_scale.repeat_interleave(BLOCK, 0)[:rows]


def _wide_z(
    x: Tensor, weight: Tensor, x_scale: Tensor, w_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """x̂ ŵᵀ + bias in fp32, or in dtype if that is wider."""
    wide, exact = torch.promote_types(dtype, torch.float32), x.dtype == torch.float64
    of_scales = torch.float64 if exact else torch.float32
    if x_scale.dtype != of_scales or w_scale.dtype != of_scales:
        raise TypeError(f"scaled_linear: expected scales in fp32, got {x_scale.dtype} and {w_scale.dtype}")
    w_scale = _each_row(w_scale, weight)
    if x_scale.shape[1] != 1 or exact:
        z = _wide_linear(dequantize_ref(x, x_scale, wide), dequantize_ref(weight, w_scale, wide), wide)
    else:
        (w_rest, w_root), (x_rest, x_root) = halves_of(w_scale.t()), halves_of(x_scale)
        z = _wide_linear(x, weight, wide).mul_(w_rest).mul_(x_rest).mul_(w_root * x_root)
    return z if bias is None else z.add_(bias)


def _wide_linear(x: Tensor, weight: Tensor, wide: torch.dtype) -> Tensor:
    """x weightᵀ in `wide`."""
    on_gpu = x.is_cuda and torch.version.hip is None and x.numel() and weight.numel()
    if on_gpu and x.dtype.itemsize == 1 and wide == torch.float32:
        # bf16 holds all numbers of fp8, and its products are exact in fp32
        return torch.mm(x.to(torch.bfloat16), weight.to(torch.bfloat16).t(), out_dtype=wide)
    return functional.linear(x.to(wide), weight.to(wide))


def _scaled_mm(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    activation: Activation,
    keep_z: bool,
    dtype: Wide,
    fast_accumulate: bool,
    *,
    out: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor | None]:
    """By cuBLASLt or CUTLASS, which promote sums unless told not to. The activation is that of the rounded z.

    out: y, and z if it is kept and not y
    """
    if not out:
        y = x.new_empty((x.shape[0], weight.shape[0]), dtype=DTYPE[dtype])
        out = y, torch.empty_like(y) if keep_z and activation != "none" else y
    y, z = out[0], out[-1]
    torch._scaled_mm(
        x,
        weight.t(),
        x_scale.contiguous(),
        w_scale.t().contiguous(),
        bias=None if bias is None else bias.to(z.dtype),
        out_dtype=z.dtype,
        use_fast_accum=fast_accumulate,
        out=z,
    )
    act_into(y, z, activation)
    return y, z if keep_z else None


def _scaled_mm_fits(key: TuneKey, target: Target) -> bool:
    """Row-wise scales, rows of whole 16-byte units, and not e5m2 by e5m2."""
    e5m2 = key.dtype == torch.float8_e5m2 and "float8_e4m3fn" not in key.options
    return (
        not {"blocks", "square"} & set(key.options)
        and target.backend == "cuda"
        and target.capability >= 89
        and key.result == torch.bfloat16
        and not e5m2
        and key.out_features % 16 == key.in_features % 16 == 0
        and not any(layout.tma_obstacle() for layout in key.layouts)
    )


def _scaled_linear_sample(layer: Layer) -> tuple[Any, ...]:
    x = layer.scaled(layer.tokens, layer.in_features, layer.format)
    weight = layer.scaled(layer.out_features, layer.in_features, "e4m3", square=True)
    w_scale = weight.scale_of_squares if layer.square else weight.scale
    bias = layer.tensor(layer.out_features, dtype=torch.bfloat16) if layer.bias else None
    keep_z = layer.training and layer.activation != "none"
    return x.data, weight.data, x.scale, w_scale, bias, layer.activation, keep_z, "bfloat16", layer.fast


scaled_linear = Primitive(
    "scaled_linear(Tensor x, Tensor weight, Tensor x_scale, Tensor w_scale, Tensor? bias, str activation, "
    "bool keep_z, str dtype, bool fast_accumulate) -> y, z if keep_z",
    _scaled_linear,
    launcher("scaled_linear", "scaled_linear_fwd", "activation", "keep_z", "dtype", "fast_accumulate"),
    _scaled_linear_sample,
    "linear",
    library=(
        Library("torch", _scaled_linear, into=writing(_scaled_linear)),
        Library("scaled_mm", _scaled_mm, _scaled_mm_fits, into=writing(_scaled_mm)),
    ),
)
