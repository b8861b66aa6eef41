"""How what computes in fp8 is called, and which launches of it are compiled; see `calls` and `catalog`.

Sums are promoted by the compiler on Hopper and in the kernel's own words on Ada and the smaller Blackwell, so
that the pointer form is recorded for both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import torch

from tpkernels.dispatch.scaled import DTYPE, Wide
from tpkernels.gate.calls import Operands, Results
from tpkernels.gate.machine_code import FP8_PRODUCTS
from tpkernels.gate.recording import MetaOperands, Recipe
from tpkernels.kernels.activations import Activation, act_ref
from tpkernels.kernels.dequantize import dequantize as dequantize_launcher
from tpkernels.kernels.footprints import SHORT_NAMES, stem_of
from tpkernels.kernels.operands import Form
from tpkernels.kernels.quantize import quantize as quantize_launcher
from tpkernels.kernels.quantize import quantize_act, quantize_glu
from tpkernels.kernels.recipe import BLOCK, Format, Scaling
from tpkernels.kernels.scaled import DTYPE_OF, Scaled, dequantize_ref, quantize_ref
from tpkernels.kernels.scaled_linear import scaled_linear_fwd
from tpkernels.kernels.target import B200, H100, L40S, Target
from tpkernels.kernels.tiles import MAX_FEATURES, MatmulTile, candidates, serves, sum_tile

T, N, K = 2096, 512, 1024  # multiples of 16
E4M3, E5M2 = DTYPE_OF["e4m3"], DTYPE_OF["e5m2"]
SCALES: Mapping[str, Mapping[str, Any]] = {  # as a problem's options say -> how that is asked for
    "": {},
    "+blocks": {"scaling": "blocks"},
    "+blocks+square": {"scaling": "blocks", "square": True},
}


WIDE = (8192, MAX_FEATURES, 2 * MAX_FEATURES)  # features of rows; no program holds the last


@dataclass(frozen=True, slots=True)
class _Way:
    """A form on GPUs for which it is one kernel."""

    form: Form
    target: Target
    architectures: tuple[str, ...]


WAYS = (
    _Way("descriptor", H100, ("sm_90",)),
    _Way("descriptor", B200, ("sm_100",)),
    _Way("pointer", H100, ("sm_90", "sm_100")),
    _Way("pointer", L40S, ("sm_89", "sm_120")),
)


def scaled_linear(
    of: Operands,
    scaling: Scaling = "rows",
    activation: Activation = "none",
    optional: bool = True,
    dtype: Wide = "bfloat16",
    format: Format = "e4m3",
    square: bool = False,
) -> Results:
    """Against what float64 makes of the dequantized operands.

    square: a row of scales for each 128 rows of the weight, instead of one for each of them
    optional: with bias and what is kept for backward
    dtype: of the result
    format: of x, which may be a gradient
    """
    tokens, in_features, out_features = of.sizes
    x = of.scaled(tokens, in_features, format, scaling)
    weight = of.scaled(out_features, in_features, "e4m3", scaling, square=True)
    bias = of.tensor(out_features, dtype=DTYPE[dtype]) if optional else None
    w_scale = weight.scale[::BLOCK] if square else weight.scale
    ours = scaled_linear_fwd(
        *(x.data, weight.data, x.scale, w_scale, bias),
        activation=activation,
        keep_z=optional,
        dtype=dtype,
        tile=of.tile,
        form=of.form,
    )
    exact = [dequantize_ref(one.data, one.scale, torch.float64) for one in (x, weight)]
    z = exact[0] @ exact[1].t() + (0 if bias is None else bias.double())
    return {"y": (ours.y, act_ref(z, activation))} | ({"z": (ours.z, z)} if optional else {})


def quantize(
    of: Operands,
    scaling: Scaling = "rows",
    format: Format = "e4m3",
    power_of_two: bool = False,
    square: bool = False,
    by_columns: bool = False,
) -> Results:
    """The words, byte for byte.

    by_columns: of a matrix whose columns are contiguous, as those of a weight for dgrad
    """
    tokens, in_features, _ = of.sizes
    x = of.tensor(in_features, tokens).t() if by_columns else of.tensor(tokens, in_features)
    x[0], x[1, -1], x[2, 0] = 0, float("inf"), float("nan")
    x[3] *= 1e-36
    x[4] *= 1e36
    ways: dict[str, Any] = {"power_of_two": power_of_two, "square": square}
    ours = quantize_launcher(x, format=format, scaling=scaling, **ways)
    exact = quantize_ref(x, format, scaling, **ways)
    return {"words": (ours.view(torch.uint8).float(), exact.view(torch.uint8).double())}


def quantize_activation(of: Operands, scaling: Scaling = "rows", gated: bool = True) -> Results:
    """Of silu(z) or silu(g) * u: what is rounded to fp8 may differ where fp32 does."""
    tokens, in_features, _ = of.sizes
    g, u = of.tensor(tokens, in_features), of.tensor(tokens, in_features)
    if gated:
        words = quantize_glu(g, u, kind="swiglu", format="e4m3", scaling=scaling)
    else:
        words = quantize_act(g, activation="silu", format="e4m3", scaling=scaling)
    values = act_ref(g.double(), "silu") * (u.double() if gated else 1)
    ours, exact = (
        Scaled(one, in_features, "e4m3", scaling)
        for one in (words, quantize_ref(values.float(), "e4m3", scaling))
    )
    # bf16 holds all numbers of e4m3
    return {"scale": (ours.scale, exact.scale.double()), "data": (ours.data.bfloat16(), exact.data.double())}


def dequantize(of: Operands, scaling: Scaling) -> Results:
    tokens, in_features, _ = of.sizes
    given = of.scaled(tokens, in_features, "e4m3", scaling)
    ours = dequantize_launcher(given.data, given.scale, dtype=str(of.dtype).removeprefix("torch."))
    return {"y": (ours, dequantize_ref(given.data, given.scale, torch.float64))}


QUANTIZED: Mapping[str, Callable[[Operands], Results]] = {
    "rows": quantize,
    "rows+e5m2": partial(quantize, format="e5m2"),
    "rows+power_of_two": partial(quantize, power_of_two=True),
    "rows+by_columns": partial(quantize, by_columns=True),
    "blocks": partial(quantize, scaling="blocks"),
    "blocks+by_columns": partial(quantize, scaling="blocks", by_columns=True),
    "blocks+square": partial(quantize, scaling="blocks", square=True),
    "rows+silu": partial(quantize_activation, gated=False),
    "rows+swiglu": quantize_activation,
    "blocks+silu": partial(quantize_activation, scaling="blocks", gated=False),
    "blocks+swiglu": partial(quantize_activation, scaling="blocks"),
}


def recipes() -> Iterator[Recipe]:
    """Of what multiplies, and of what quantizes."""
    yield from _products()
    for way, call in QUANTIZED.items():
        yield _row_recipe("quantize", f"{K}/{way}", call)
    for features in WIDE:
        yield _row_recipe("quantize", f"{features}/rows", quantize, features)
    yield _row_recipe("quantize", f"{K}/rows", quantize, dtype=torch.float32)
    for scaling in get_args(Scaling):
        yield _row_recipe("dequantize", f"{K}/{scaling}", partial(dequantize, scaling=scaling))


def _products() -> Iterator[Recipe]:
    """The costliest epilogue of each tile, and with descriptors the plain one; fp32 results of the largest.

    e5m2 is the format of gradients, which meet weights in e4m3: the largest tile of each form.
    """
    for way in WAYS:
        for tile in candidates("linear", way.form, E4M3, way.target):
            yield from _of_tile(way, tile)
        if way.form == "pointer":
            for tile in candidates("linear", way.form, E4M3, way.target, ragged=True):
                yield from _of_tile(way, tile, ragged=True)
        for scales, options in SCALES.items():
            summed = partial(scaled_linear, **options, optional=False, dtype="float32")
            yield _recipe(way, sum_tile(way.form, E4M3, way.target), f"none+=fp32{scales}", summed)
        gradient = partial(scaled_linear, optional=False, format="e5m2")
        largest = candidates("linear", way.form, E5M2, way.target)[0]
        yield _recipe(way, largest, "none+float8_e4m3fn", gradient, E5M2)


def _of_tile(way: _Way, tile: MatmulTile, ragged: bool = False) -> Iterator[Recipe]:
    for scales, options in SCALES.items():
        if not serves("linear", tile, scales.split("+")):
            continue
        costly = partial(scaled_linear, **options, activation="gelu_tanh")
        yield _recipe(way, tile, f"gelu_tanh+bias+z{scales}", costly, ragged=ragged)
        if way.form == "descriptor":
            plain = partial(scaled_linear, **options, optional=False)
            yield _recipe(way, tile, f"none{scales}", plain)


def _row_recipe(
    kernel: str,
    way: str,
    call: Callable[[MetaOperands], object],
    features: int = K,
    dtype: torch.dtype = torch.bfloat16,
) -> Recipe:
    of = MetaOperands(T, N, features, dtype)
    return Recipe(f"{kernel}/pointer/{SHORT_NAMES[dtype]}/{way}", call, of, H100, tuple(FP8_PRODUCTS))


def _recipe(
    way: _Way,
    tile: MatmulTile,
    epilogue: str,
    call: Callable[[MetaOperands], object],
    dtype: torch.dtype = E4M3,
    ragged: bool = False,
) -> Recipe:
    odd = int(ragged)
    of = MetaOperands(T + odd, N + odd, K + odd, dtype, form=way.form, tile=tile, ragged=ragged)
    prefix = f"{way.architectures[0]}/" if way.target in (B200, L40S) else ""
    name = f"{prefix}{stem_of('scaled_linear', way.form, dtype, tile)}/{epilogue}{'/ragged' * ragged}"
    return Recipe(name, call, of, way.target, way.architectures)
