"""Shared memory of the compiled kernels, as the gate has written it down in `budgets.json`."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from tpkernels.files import parsed, read_text
from tpkernels.kernels.operands import Form
from tpkernels.kernels.tiles import Kernel, MatmulTile

TABLE = Path(__file__).with_name("budgets.json")
SHORT_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def stem_of(kernel: Kernel, form: Form, dtype: torch.dtype, tile: MatmulTile) -> str:
    """What the names of all entries with this tile have in common."""
    return f"{kernel}/{form}/{SHORT_NAMES[dtype]}/{tile.name}"


def least_shared_memory(kernel: Kernel, form: Form, dtype: torch.dtype, tile: MatmulTile) -> int:
    """Bytes that a block takes where it takes the fewest, of all that was compiled; 0 if unknown.

    A GPU with less cannot launch it, whatever its architecture and whichever Triton compiles.
    """
    dtype = torch.float32 if dtype == torch.float32 else torch.bfloat16  # fp16 takes what bf16 does
    stem = f"/{stem_of(kernel, form, dtype, tile)}/"
    return min((shared for name, shared in _compiled() if stem in name), default=0)


@cache
def _compiled() -> tuple[tuple[str, int], ...]:
    """Name between slashes and shared memory of each entry, for each Triton and architecture."""
    return tuple(
        (f"/{name}/", int(budget["shared"]))
        for table in parsed(read_text(TABLE)).values()
        for rows in table["rows"].values()
        for name, budget in rows.items()
    )
