"""What the choice of a form and a tile may not depend on, where bits must not depend on it.

Batch invariance: a row of tokens gets the same bits whatever other rows are computed with it.
TPKERNELS_BATCH_INVARIANT=1, read when this module is imported, asks for it. A row's bits depend on the form
and the tile of the kernel, so neither may be chosen by the number of rows. The tile is the one that suits
USUAL_ROWS, and a matrix of one row is judged as if more rows followed. Sums over tokens (weight and bias
gradients) have no rows to keep apart, and choose as ever.

TP-invariance, see `tp_invariance`, asks for more: shards are narrower the more ranks there are, so that the
number of columns says nothing either, and weight gradients choose by neither. The form would change where
rows are whole 16-byte units at some tensor-parallel sizes only, such as rows of 12 elements, cut into 3 at
another size. A launcher knows its shard alone, so it refuses every 16-bit product with a matrix that could
not be described at this size: what passes at all sizes has one form at all sizes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from tpkernels.env import env_flag
from tpkernels.tp_invariance import VARIABLE, segments_of_op

if TYPE_CHECKING:
    from tpkernels.kernels.operands import MatrixLayout
    from tpkernels.kernels.target import Target
    from tpkernels.kernels.tiles import BlockTile, Kernel

USUAL_ROWS = 4096
USUAL_COLS = 4096

# Read once: looking into the environment takes as long as a tenth of a tiny product.
batch_invariant = env_flag("TPKERNELS_BATCH_INVARIANT", default=False)


def why_fixed() -> str:
    """What forbids choices by batch, or by timing: the variable that asks for it, or "" if none does."""
    if segments := segments_of_op():
        return f"{VARIABLE}={segments}"
    return "TPKERNELS_BATCH_INVARIANT=1" if batch_invariant else ""


def tile_of_sums() -> BlockTile:
    """Return the tile of sums over tokens."""
    from tpkernels.kernels.tiles import ORDERED_SUM, SUM  # here: launch plans call this once a shape

    return ORDERED_SUM if segments_of_op() else SUM


def judged_size(kernel: Kernel, rows: int, cols: int) -> tuple[int, int]:
    """What the choice of a tile may know of the rows and columns of the result."""
    if segments_of_op():
        return USUAL_ROWS, USUAL_COLS
    return (USUAL_ROWS, cols) if batch_invariant and kernel != "wgrad" else (rows, cols)


def judged_layouts(kernel: Kernel, layouts: tuple[MatrixLayout, ...]) -> tuple[MatrixLayout, ...]:
    """The layouts that the choice of a form may know of."""
    if segments_of_op() or (batch_invariant and kernel != "wgrad"):
        return tuple(_among_others(layout) for layout in layouts)
    return layouts


def require_one_form(
    launcher: str, target: Target, dtype: torch.dtype, layouts: tuple[MatrixLayout, ...]
) -> None:
    """TP-invariance: 16-bit matrices must be such that the form is the same at every tensor-parallel size.

    fp32 has one form and one list of tiles. So has the interpreter, and empty matrices are empty at any size.
    """
    segments = segments_of_op()
    if not segments or dtype.itemsize != 2 or target.backend == "interpreter":
        return
    filled = (layout for layout in layouts if layout.rows and layout.cols)
    if obstacle := next((found for layout in filled if (found := layout.tma_obstacle())), None):
        raise ValueError(
            f"{launcher}: TP-invariance expected rows of whole, aligned 16-byte units, so that the kernel is "
            f"the same at every tensor-parallel size, but {obstacle}: make it contiguous, or choose features "
            f"of which each of {segments} segments is a multiple of 8"
        )


def _among_others(layout: MatrixLayout) -> MatrixLayout:
    """A single row says nothing of the distance to the next one, but a descriptor of many needs it even."""
    if layout.rows != 1:
        return layout
    return replace(layout, rows=2, row_stride=max(layout.row_stride, layout.cols))
