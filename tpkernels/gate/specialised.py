"""The numeric gate's cases of warp-specialised kernels: computed in one order of events, sound in all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from tpkernels.gate import calls
from tpkernels.gate.calls import Operands, Results
from tpkernels.kernels.tiles import MatmulTile

# with fewer tiles, steps or buffers a buffer would not be used again; with more, orders take minutes
SIZES = (48, 32, 48)  # tokens, in_features, out_features
TILES = (
    MatmulTile(16, 32, 16, num_warps=8, num_stages=3, parts=2, consumers=1),
    MatmulTile(16, 32, 16, num_warps=4, num_stages=2, parts=2, consumers=2),
)


def cases(operands: Callable[[MatmulTile], Operands]) -> Iterator[tuple[str, Callable[[], Results]]]:
    """Name and computation of each."""
    for tile in TILES:
        of = operands(tile)
        for name, options in (
            ("linear", {"activation": "silu"}),
            ("glu", {"glu": "swiglu"}),
            ("dgrad", {}),
            ("dgrad_pairs", {}),
            ("dgrad_act", {"activation": "gelu_tanh"}),
            ("dglu", {"glu": "geglu_tanh"}),
        ):
            yield f"{name}/gluon/bf16/{tile.name}", partial(_explored, of, name, options)


def _explored(of: Operands, name: str, options: dict[str, str]) -> Results:
    from tpkernels.gate import machine  # Triton before 3.7 has Gluon in another form

    with machine.emulating(machine.SCHEDULES["late reads"], processors=1) as launched:
        results = calls.product(of, name, **options)  # type: ignore[arg-type]
    for launch in launched:
        launch.explore()
    return results
