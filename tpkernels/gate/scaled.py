"""How what computes in fp8 is called, and which launches of it are compiled; see `calls` and `catalog`.

Sums are promoted by the compiler on Hopper and in the kernel's own words on Ada and the smaller Blackwell, so
that the pointer form is recorded for both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from tpkernels.dispatch.scaled import DTYPE, Wide
from tpkernels.gate.calls import Operands, Results
from tpkernels.gate.recording import MetaOperands, Recipe
from tpkernels.kernels.activations import Activation, act_ref
from tpkernels.kernels.footprints import stem_of
from tpkernels.kernels.operands import Form
from tpkernels.kernels.recipe import Format, Scaling
from tpkernels.kernels.scaled import DTYPE_OF, dequantize_ref
from tpkernels.kernels.scaled_linear import scaled_linear_fwd
from tpkernels.kernels.target import B200, H100, L40S, Target
from tpkernels.kernels.tiles import MatmulTile, candidates, sum_tile

T, N, K = 2096, 512, 1024  # multiples of 16
E4M3, E5M2 = DTYPE_OF["e4m3"], DTYPE_OF["e5m2"]
NAMES: Mapping[Scaling, str] = {"rows": "", "blocks": "+blocks"}  # as a problem's options say


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
) -> Results:
    """Against what float64 makes of the dequantized operands.

    optional: with bias and what is kept for backward
    dtype: of the result
    format: of x, which may be a gradient
    """
    tokens, in_features, out_features = of.sizes
    x = of.scaled(tokens, in_features, format, scaling)
    weight = of.scaled(out_features, in_features, "e4m3", scaling, square=True)
    bias = of.vector(out_features, DTYPE[dtype]) if optional else None
    ours = scaled_linear_fwd(
        *(x.data, weight.data, x.scale, weight.scale, bias),
        activation=activation,
        keep_z=optional,
        dtype=dtype,
        tile=of.tile,
        form=of.form,
    )
    exact = [dequantize_ref(one.data, one.scale, torch.float64) for one in (x, weight)]
    z = exact[0] @ exact[1].t() + (0 if bias is None else bias.double())
    return {"y": (ours.y, act_ref(z, activation))} | ({"z": (ours.z, z)} if optional else {})


def recipes() -> Iterator[Recipe]:
    """The costliest epilogue of each tile, and with descriptors the plain one; fp32 results of the largest.

    e5m2 is the format of gradients, which meet weights in e4m3: the largest tile of each form.
    """
    for way in WAYS:
        for tile in candidates("linear", way.form, E4M3, way.target):
            yield from _of_tile(way, tile)
        if way.form == "pointer":
            for tile in candidates("linear", way.form, E4M3, way.target, ragged=True):
                yield from _of_tile(way, tile, ragged=True)
        for scaling in NAMES:
            summed = partial(scaled_linear, scaling=scaling, optional=False, dtype="float32")
            yield _recipe(way, sum_tile(way.form, E4M3, way.target), f"none+=fp32{NAMES[scaling]}", summed)
        gradient = partial(scaled_linear, optional=False, format="e5m2")
        largest = candidates("linear", way.form, E5M2, way.target)[0]
        yield _recipe(way, largest, "none+float8_e4m3fn", gradient, E5M2)


def _of_tile(way: _Way, tile: MatmulTile, ragged: bool = False) -> Iterator[Recipe]:
    for scaling in NAMES:
        costly = partial(scaled_linear, scaling=scaling, activation="gelu_tanh")
        yield _recipe(way, tile, f"gelu_tanh+bias+z{NAMES[scaling]}", costly, ragged=ragged)
        if way.form == "descriptor":
            plain = partial(scaled_linear, scaling=scaling, optional=False)
            yield _recipe(way, tile, f"none{NAMES[scaling]}", plain)


def _recipe(
    way: _Way,
    tile: MatmulTile,
    epilogue: str,
    call: Callable[[MetaOperands], object],
    dtype: torch.dtype = E4M3,
    ragged: bool = False,
) -> Recipe:
    odd = int(ragged)
    of = MetaOperands(dtype, T + odd, K + odd, N + odd, 1, way.form, tile, ragged=ragged)
    prefix = f"{way.architectures[0]}/" if way.target in (B200, L40S) else ""
    name = f"{prefix}{stem_of('scaled_linear', way.form, dtype, tile)}/{epilogue}{'/ragged' * ragged}"
    return Recipe(name, call, of, way.target, way.architectures)
