"""How many waves layers of large models take on an H100, for `docs/measured-kernels.md`: arithmetic."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from bench.shapes import MODELS, Shape, shapes_of
from tpkernels.gate.occupancy import waves
from tpkernels.kernels.target import H100
from tpkernels.kernels.tiles import Kernel, default_tile

NAMED = ("llama3-8b", "llama3-70b")
TENSOR_SIZES = (1, 8)
TOKENS = 8192
HEADER = """## Waves

Tiles over blocks that run at once, on the 132 SMs of an H100, with the tiles that are taken without tuning.
In a wave each block takes a tile; the last wave is rarely full, and busy is the part of all waves that is
work. Arithmetic only, by `bench/waves.py`.
"""


def named_shapes() -> Iterator[Shape]:
    for model in MODELS:
        if model.name in NAMED:
            for tensor in TENSOR_SIZES:
                yield from shapes_of(model, tensor, TOKENS)


def results_of(shape: Shape) -> Iterator[tuple[Kernel, int, int]]:
    """The kernels of a layer's forward and backward, with rows and columns of what each computes."""
    tokens, out, into = shape.tokens, shape.out_features, shape.in_features
    gated = shape.model.gated
    yield ("glu" if gated and shape.layer == "fc_up" else "linear"), tokens, out
    yield ("dglu" if gated and shape.layer == "fc_down" else "dgrad"), tokens, into
    yield "wgrad", out, into


def table() -> Iterator[str]:
    """The lines of the section."""
    yield HEADER
    yield f"| layer, {TOKENS:,} tokens | kernel | result | tile | tiles | waves | busy |"
    yield "|---|---|---|---|---|---|---|"
    for shape in named_shapes():
        for kernel, rows, cols in results_of(shape):
            tile = default_tile(kernel, "descriptor", torch.bfloat16, H100, rows, cols)
            tiles = tile.tiles(rows, cols) * tile.splits
            count, busy = waves(tiles, H100.processors, tile.per_processor)
            layer = f"{shape.model.name}, tp {shape.tensor}, {shape.layer}"
            numbers = f"{tiles:,} | {count:.2f} | {busy:.0%}"
            yield f"| {layer} | {kernel} | {rows:,} x {cols:,} | {tile.name} | {numbers} |"
