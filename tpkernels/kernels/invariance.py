"""Batch invariance: a row of tokens gets the same bits whatever other rows are computed with it.

TPKERNELS_BATCH_INVARIANT=1, read when this module is imported, asks for it. A row's bits depend on the form
and the tile of the kernel, so neither may be chosen by the number of rows: the tile is the one that suits
USUAL_ROWS, and a matrix of one row is judged as if more rows followed. Sums over tokens (weight and bias
gradients) have no rows to keep apart, and choose as ever.
"""

from __future__ import annotations

from dataclasses import replace

from tpkernels.env_flag import env_flag
from tpkernels.kernels.operands import Layout
from tpkernels.kernels.tiles import Kernel

USUAL_ROWS = 4096

# Read once: looking into the environment takes as long as a tenth of a tiny product.
batch_invariant = env_flag("TPKERNELS_BATCH_INVARIANT", default=False)


def judged_rows(kernel: Kernel, rows: int) -> int:
    """How many rows of the result the choice of a tile may know of."""
    return USUAL_ROWS if batch_invariant and kernel != "wgrad" else rows


def judged_layouts(kernel: Kernel, layouts: tuple[Layout, ...]) -> tuple[Layout, ...]:
    """The layouts that the choice of a form may know of."""
    if not batch_invariant or kernel == "wgrad":
        return layouts
    return tuple(_among_others(layout) for layout in layouts)


def _among_others(layout: Layout) -> Layout:
    """A single row says nothing of the distance to the next one, but a descriptor of many needs it even."""
    if layout.rows != 1:
        return layout
    return replace(layout, rows=2, row_stride=max(layout.row_stride, layout.cols))
