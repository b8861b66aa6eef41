"""Records of what is computed in fp8. T tokens, N out_features, K in_features; see `kernels.scaled`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from tpkernels.dispatch.record import Layer, Primitive, launcher
from tpkernels.kernels.activations import Activation, act_ref
from tpkernels.kernels.recipe import Format, Scaling
from tpkernels.kernels.scaled import dequantize_ref, empty_words, quantize_ref

Wide = Literal["bfloat16", "float16", "float32", "float64"]
DTYPE: Mapping[Wide, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}


def _quantize(x: Tensor, format: Format, scaling: Scaling, power_of_two: bool, square: bool) -> Tensor:
    """The rows of x in fp8, each with its scales, as words. square: a scale for each 128 x 128"""
    return quantize_ref(x, format, scaling, power_of_two=power_of_two, square=square)


def _empty_quantized(x: Tensor, format: Format, scaling: Scaling, power_of_two: bool, square: bool) -> Tensor:
    return empty_words(x.shape[0], x.shape[1], scaling, x.device)


quantize = Primitive(
    "quantize",
    _quantize,
    launcher("quantize", "quantize", "format", "scaling", "power_of_two", "square"),
    lambda layer: (layer.x(), "e4m3", "rows", False, False),
    fake=_empty_quantized,
    takes=lambda x, *_: True,
)


def _dequantize(data: Tensor, scale: Tensor, dtype: Wide) -> Tensor:
    """data * scale, rounded to dtype."""
    return dequantize_ref(data, scale, DTYPE[dtype])


def _dequantize_sample(layer: Layer) -> tuple[Any, ...]:
    scaled = layer.scaled(layer.tokens, layer.in_features)
    return scaled.data, scaled.scale, "bfloat16"


dequantize = Primitive(
    "dequantize",
    _dequantize,
    launcher("quantize", "dequantize", "dtype"),
    _dequantize_sample,
    takes=lambda data, *_: True,
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
) -> tuple[Tensor, Tensor | None]:
    """y = act(z), z = x̂ ŵᵀ + bias -> (y, z), with x̂ = x * x_scale and ŵ = weight * w_scale.

    x_scale, w_scale: (T, S), (N, S), as of `Scaled`; sums are in fp32, and rounded to dtype once
    """
    into = DTYPE[dtype]
    wide = torch.promote_types(into, torch.float32)
    if x_scale.shape[1] == 1:  # products of fp8 are exact in fp32
        z = _wide_linear(x.to(wide), weight.to(wide))
        # one after the other: the product of two tiny scales may be too small for fp32
        z = z * x_scale.to(wide) * w_scale.to(wide).t()
    else:
        z = _wide_linear(dequantize_ref(x, x_scale, wide), dequantize_ref(weight, w_scale, wide))
    z = z if bias is None else z + bias.to(wide)
    return act_ref(z, activation).to(into), z.to(into) if keep_z else None


def _wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x weightᵀ in the dtype of x, which an autocast region around an op would narrow."""
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return functional.linear(x, weight)
    with torch.autocast(kind, enabled=False):
        return functional.linear(x, weight)


def _scaled_linear_sample(layer: Layer) -> tuple[Any, ...]:
    x = layer.scaled(layer.tokens, layer.in_features)
    weight = layer.scaled(layer.out_features, layer.in_features)
    bias = layer.meta(layer.out_features) if layer.bias else None
    keep_z = layer.training and layer.activation != "none"
    return x.data, weight.data, x.scale, weight.scale, bias, layer.activation, keep_z, "bfloat16"


scaled_linear = Primitive(
    "scaled_linear",
    _scaled_linear,
    launcher("scaled_linear", "scaled_linear_fwd", "activation", "keep_z", "dtype"),
    _scaled_linear_sample,
    given=lambda *call: (True, call[6]),
)
