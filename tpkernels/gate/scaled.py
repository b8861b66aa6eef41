"""How what computes in fp8 is called, and which launches of it are compiled; see `launchers` and `catalog`.

Sums are promoted by the compiler on Hopper and in the kernel's own words on Ada and the smaller Blackwell, so
that the pointer form is recorded for both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

import torch

from tpkernels.dispatch.primitives import RECORDS
from tpkernels.gate.disassembly import FP8_PRODUCTS
from tpkernels.gate.recording import (
    BARE,
    EntrySpec,
    MetaOperands,
    Operands,
    Results,
    arguments,
    in_float64,
    primitive,
)
from tpkernels.kernels.activations import Activation
from tpkernels.kernels.footprints import SHORT_NAMES, stem_of
from tpkernels.kernels.gather_scaled_linear import gather_scaled_linear_fwd
from tpkernels.kernels.operands import Form
from tpkernels.kernels.recipe import Scaling
from tpkernels.kernels.scaled import DTYPE_OF, Scaled, in_fp32
from tpkernels.kernels.target import B200, H100, L40S, Target
from tpkernels.kernels.tiles import (
    MAX_FEATURES,
    MatmulTile,
    candidates,
    default_tiles,
    mx_tiles,
    serves,
    sum_tile,
    waiting_tile,
)

T, N, K = 2096, 512, 1024  # multiples of 16
_ALL, _OF_MX = tuple(FP8_PRODUCTS), ("sm_100", "sm_120")
E4M3, E5M2 = DTYPE_OF["e4m3"], DTYPE_OF["e5m2"]
SCALES: Mapping[str, Mapping[str, Any]] = {  # as a problem's options say -> how that is asked for
    "": {},
    "+blocks": {"scaling": "blocks"},
    "+blocks+square": {"scaling": "blocks", "square": True},
}
MX: Mapping[str, Mapping[str, Any]] = {"+mx": {"scaling": "mx"}}
WAITING = {scales: SCALES[scales] for scales in ("", "+blocks+square")}
FAST: Mapping[str, Mapping[str, Any]] = {"+fast": {"fast": True}}
WIDE = (8192, MAX_FEATURES, 2 * MAX_FEATURES)  # features of rows; no program holds the last


@dataclass(frozen=True, slots=True)
class _Fp8Form:
    """A form on GPUs for which it is one kernel."""

    form: Form
    target: Target
    architectures: tuple[str, ...]


_LINEAR = partial(primitive, name="scaled_linear")

WAYS = (
    _Fp8Form("descriptor", H100, ("sm_90",)),
    _Fp8Form("descriptor", B200, ("sm_100",)),
    _Fp8Form("pointer", H100, ("sm_90", "sm_100")),
    _Fp8Form("pointer", L40S, ("sm_89", "sm_120")),
)


def gathered(of: Operands, activation: Activation = "gelu_tanh", **options: Any) -> Results:
    """`scaled_linear` of rows that arrive in chunks, from the second on."""
    record = RECORDS["scaled_linear"]
    chunk_rows = of.tokens // of.chunks
    of = replace(of, tokens=chunk_rows * of.chunks)
    x, weight, x_scale, w_scale, bias, *others = arguments(
        of, record, {"activation": activation, **options}
    ).values()
    ours = gather_scaled_linear_fwd(
        x,
        weight,
        x_scale,
        w_scale,
        bias,
        arrivals=of.arrivals(of.chunks),
        first_row=chunk_rows % of.tokens,
        activation=activation,
        keep_z=True,
        fast_accumulate=others[-1],
        tile=of.tile and waiting_tile(of.tile, chunk_rows),
        form=of.form,
    )
    assert record.oracle is not None
    exact = map(in_float64, (x, weight, x_scale, w_scale, bias))
    y, z = record.oracle(*exact, activation, True, *others[2:])
    return {"y": (ours.y, y), "z": (ours.z, z)}


def quantized(of: Operands, name: str = "quantize", by_columns: bool = False, **options: Any) -> Results:
    """The words of `quantize` and `quantize_both`, byte for byte; of activations scales and data, which may
    differ where fp32 does.

    by_columns: of a matrix whose columns are contiguous, as those of a weight for dgrad
    """
    record = RECORDS[name]
    x, *others = arguments(of, record, options).values()
    if name in ("quantize", "quantize_both"):
        x = of.tensor(*reversed(x.shape)).t() if by_columns else x
        x[0], x[1, -1], x[2, 0] = 0, float("inf"), float("nan")
        x[3] *= 1e-36
        x[4] *= 1e36
    ours, exact = record.by_kernel(x, *others), record.by_torch(*map(in_float64, (x, *others)))
    if name == "quantize_both":
        found = zip(("rows", "columns"), ours, exact, strict=True)
        return {
            what: (one.view(torch.uint8).float(), truth.view(torch.uint8).double())
            for what, one, truth in found
        }
    if name == "quantize":
        return {"words": (ours.view(torch.uint8).float(), exact.view(torch.uint8).double())}
    scaling = options.get("scaling", of.scaling)
    one, truth = (Scaled(words, of.in_features, "e4m3", scaling) for words in (ours, exact))
    # bf16 holds all numbers of e4m3
    scales = [each.scale if scaling != "mx" else in_fp32(each.scale) for each in (one, truth)]
    return {"scale": (scales[0], scales[1].double()), "data": (one.data.bfloat16(), truth.data.double())}


_ACT = partial(quantized, name="quantize_act", activation="silu")
_GLU = partial(quantized, name="quantize_glu")
_BOTH = partial(quantized, name="quantize_both")
QUANTIZED: Mapping[str, partial[Results]] = {
    "rows": partial(quantized),
    "rows+e5m2": partial(quantized, format="e5m2"),
    "rows+power_of_two": partial(quantized, power_of_two=True),
    "rows+by_columns": partial(quantized, by_columns=True),
    "blocks": partial(quantized, scaling="blocks"),
    "blocks+by_columns": partial(quantized, scaling="blocks", by_columns=True),
    "blocks+square": partial(quantized, scaling="blocks", square=True),
    "both": _BOTH,
    "both+by_columns": partial(_BOTH, by_columns=True, format="e5m2"),
    "rows+silu": _ACT,
    "rows+swiglu": _GLU,
    "blocks+silu": partial(_ACT, scaling="blocks"),
    "blocks+swiglu": partial(_GLU, scaling="blocks"),
    "mx": partial(quantized, scaling="mx"),
    "mx+e5m2": partial(quantized, scaling="mx", format="e5m2"),
    "mx+by_columns": partial(quantized, scaling="mx", by_columns=True),
    "mx+silu": partial(_ACT, scaling="mx"),
    "mx+swiglu": partial(_GLU, scaling="mx"),
    "mx+both": partial(_BOTH, scaling="mx"),
}

BOTH = {"rows": "_quantize_rows_and_largest_kernel", "columns": "_quantize_strips_kernel"}


def entry_specs() -> Iterator[EntrySpec]:
    """Of what multiplies, and of what quantizes."""
    yield from _products()
    yield from _mx_products()
    for way, quantize in QUANTIZED.items():
        is_mx = way.startswith("mx")
        if is_mx or quantize.keywords.get("name") != "quantize_both":
            yield _row_spec("quantize", f"{K}/{way}", quantize, architectures=_OF_MX if is_mx else _ALL)
    for features in (K, MAX_FEATURES):
        for half, function in BOTH.items():
            spec = _row_spec("quantize", f"{features}/both/{half}", _BOTH, features)
            yield replace(spec, function=function)
    for features in WIDE:
        yield _row_spec("quantize", f"{features}/rows", quantized, features)
    yield _row_spec("quantize", f"{K}/rows", quantized, dtype=torch.float32)
    yield from _waiting_products()
    for scaling in get_args(Scaling):
        call = partial(primitive, name="dequantize", scaling=scaling)
        yield _row_spec(
            "dequantize", f"{K}/{scaling}", call, architectures=_OF_MX if scaling == "mx" else _ALL
        )


def _products() -> Iterator[EntrySpec]:
    """The costliest epilogue of each tile, and with descriptors the plain one; fp32 results of the largest.

    The same with fast accumulation, but for Blackwell's tiles, whose code does not differ. e5m2 is the format
    of gradients, which meet weights in e4m3: the largest tile of each form, and those in roles.
    """
    for way in WAYS:
        for tile in candidates("linear", way.form, E4M3, way.target):
            yield from _of_tile(way, tile)
        if way.form == "pointer":
            for tile in candidates("linear", way.form, E4M3, way.target, ragged=True):
                yield from _of_tile(way, tile, ragged=True)
        for scales, options in SCALES.items():
            summed = partial(_LINEAR, **options, **BARE, into=torch.float32)
            yield _spec(way, sum_tile(way.form, E4M3, way.target), f"none+=fp32{scales}", summed)
        gradient = partial(_LINEAR, **BARE, format="e5m2")
        largest, *others = candidates("linear", way.form, E5M2, way.target)
        for tile in (largest, *(tile for tile in others if tile.halves)):
            yield _spec(way, tile, "none+float8_e4m3fn", gradient, E5M2)


def _mx_products() -> Iterator[EntrySpec]:
    """As of others; with pointers, the costliest epilogue alone."""
    of_forms: tuple[tuple[Form, tuple[str, ...]], ...] = ("descriptor", ("sm_100",)), ("pointer", _OF_MX)
    for form, architectures in of_forms:
        way = _Fp8Form(form, B200, architectures)
        for tile in mx_tiles(form, B200):
            yield from _of_tile(way, tile, scalings=MX)
        if form == "pointer":
            for tile in mx_tiles(form, B200, ragged=True):
                yield from _of_tile(way, tile, ragged=True, scalings=MX)
        largest = mx_tiles(form, B200)[0]
        summed = partial(_LINEAR, **MX["+mx"], **BARE, into=torch.float32)
        yield _spec(way, largest, "none+=fp32+mx", summed)
        gradient = partial(_LINEAR, **MX["+mx"], **BARE, format="e5m2")
        yield _spec(way, largest, "none+float8_e4m3fn+mx", gradient, E5M2)


def _waiting_products() -> Iterator[EntrySpec]:
    """Of the tiles that launchers take by themselves, as none is chosen by timing; of weights' own scales."""
    for way in WAYS:
        for ragged in (False, True) if way.form == "pointer" else (False,):
            for tile in default_tiles("linear", way.form, E4M3, way.target, ragged=ragged):
                for scales, options in (WAITING if way.target == B200 else {**WAITING, **FAST}).items():
                    call = partial(gathered, **options)
                    epilogue = f"gelu_tanh+bias+z{scales}"
                    yield _spec(way, tile, epilogue, call, ragged=ragged, kernel="gather_linear", chunks=2)


def _of_tile(
    way: _Fp8Form,
    tile: MatmulTile,
    ragged: bool = False,
    scalings: Mapping[str, Mapping[str, Any]] = SCALES,
) -> Iterator[EntrySpec]:
    for scales, options in (scalings if way.target == B200 else {**scalings, **FAST}).items():
        if not serves("linear", tile, scales.split("+")):
            continue
        costly = partial(_LINEAR, **options, activation="gelu_tanh")
        yield _spec(way, tile, f"gelu_tanh+bias+z{scales}", costly, ragged=ragged)
        if way.form == "descriptor":
            plain = partial(_LINEAR, **options, **BARE)
            yield _spec(way, tile, f"none{scales}", plain)


def _row_spec(
    kernel: str,
    way: str,
    call: Callable[[MetaOperands], object],
    features: int = K,
    dtype: torch.dtype = torch.bfloat16,
    architectures: tuple[str, ...] = _ALL,
) -> EntrySpec:
    of, target = MetaOperands(T, N, features, dtype), B200 if architectures == _OF_MX else H100
    return EntrySpec(f"{kernel}/pointer/{SHORT_NAMES[dtype]}/{way}", call, of, target, architectures)


def _spec(
    way: _Fp8Form,
    tile: MatmulTile,
    epilogue: str,
    call: Callable[[MetaOperands], object],
    dtype: torch.dtype = E4M3,
    ragged: bool = False,
    kernel: str = "scaled_linear",
    chunks: int = 1,
) -> EntrySpec:
    odd = int(ragged)
    sizes = T + odd, N + odd, K + odd
    of = MetaOperands(*sizes, dtype, chunks=chunks + odd, form=way.form, tile=tile, ragged=ragged)
    prefix = f"{way.architectures[0]}/" if way.target in (B200, L40S) else ""
    name = f"{prefix}{stem_of(kernel, way.form, dtype, tile)}/{epilogue}{'/ragged' * ragged}"
    return EntrySpec(name, call, of, way.target, way.architectures)
