"""Where the gate keeps what compiled kernels take, and how it names them."""

from __future__ import annotations

from pathlib import Path

import torch

from tpkernels.kernels.matmul_tile import MatmulTile
from tpkernels.kernels.operands import Form

TABLE = Path(__file__).parents[1] / "kernels" / "budgets.json"
SHORT_NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
}


def stem_of(kernel: str, form: Form, dtype: torch.dtype, tile: MatmulTile) -> str:
    """What the names of all entries with this tile have in common."""
    return f"{kernel}/{form}/{SHORT_NAMES[dtype]}/{tile.name}"
