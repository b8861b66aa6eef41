"""What compiled kernels take of a GPU: as the gate has written it into `budgets.json`, or by arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from tpkernels.files import parsed, read_text
from tpkernels.kernels.operands import FP8, Form
from tpkernels.kernels.target import Target
from tpkernels.kernels.tiles import Kernel, MatmulTile

TABLE = Path(__file__).with_name("budgets.json")
SHORT_NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
}

REGISTERS = 65_536  # of a multiprocessor, handed out in units of 8 to each thread
BLOCK_BYTES = 1024  # of shared memory that CUDA takes for each block
MOST_SPILLS = 16  # instructions; tests hold shipped tiles to it


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a block takes, as far as it is known."""

    shared: int  # bytes
    registers: int = 0  # a thread
    spills: int = 0

    def obstacle(self, tile: MatmulTile, target: Target) -> str | None:
        """Why a tile cannot run as it says it does, or not well; None if it can."""
        blocks, shared_memory = tile.per_processor, target.shared_memory
        if self.shared > shared_memory:
            return f"{self.shared:,} bytes of shared memory, of {shared_memory:,}"
        if self.spills > MOST_SPILLS:
            return f"{self.spills} spills"
        if target.backend != "cuda":
            return None
        if blocks * (self.shared + BLOCK_BYTES) > shared_memory + BLOCK_BYTES:
            return f"{blocks} blocks of {self.shared:,} bytes do not fit a processor"
        registers = blocks * 32 * tile.num_warps * (-(-self.registers // 8) * 8)
        if registers > REGISTERS:
            return f"{registers:,} registers for {blocks} of its blocks, of {REGISTERS:,}"
        return None


def stem_of(kernel: str, form: Form, dtype: torch.dtype, tile: MatmulTile) -> str:
    """What the names of all entries with this tile have in common."""
    return f"{kernel}/{form}/{SHORT_NAMES[dtype]}/{tile.name}"


def least_shared_memory(kernel: str, form: Form, dtype: torch.dtype, tile: MatmulTile) -> int:
    """Bytes that a block takes where it takes the fewest, of all that was compiled; 0 if unknown.

    A GPU with less cannot launch it, whatever its architecture and whichever Triton compiles.
    """
    stem = f"/{stem_of(kernel, form, _compiled_as(dtype), tile)}/"
    return min((row.shared for _, _, name, row in _compiled() if stem in name), default=0)


def compiled_footprint(
    kernel: str,
    form: Form,
    dtype: torch.dtype,
    tile: MatmulTile,
    epilogue: str,
    architecture: str,
    triton: str,
) -> Footprint | None:
    """What was compiled for an architecture by a minor version of Triton ("3.7"); None if nothing was.

    Of an epilogue that was not, it is what every other takes with this tile: that is needed at least.
    """
    stem = f"/{stem_of(kernel, form, _compiled_as(dtype), tile)}/"
    rows = {
        name.partition(stem)[2].strip("/"): row
        for minor, arch, name, row in _compiled()
        if (minor, arch) == (triton, architecture) and stem in name
    }
    if epilogue in rows or not rows:
        return rows.get(epilogue)
    every = rows.values()
    return Footprint(
        min(row.shared for row in every),
        min(row.registers for row in every),
        min(row.spills for row in every),
    )


def expected_shared_memory(
    kernel: Kernel,
    dtype: torch.dtype,
    tile: MatmulTile,
    *,
    result: int = 2,
    reads: bool = False,
) -> int:
    """Bytes that a block of a descriptor kernel takes on Hopper, but for some for barriers and alignment.

    Operands in flight, and one part of a result on its way to or from memory; a flattened loop that also
    reads in its epilogue keeps apart what it reads and what it writes. A test holds it to what was compiled.

    result: bytes of an element of what is written
    reads: the epilogue loads a matrix: z, g and u, or what is added to
    """
    cols = tile.block_cols * (2 if kernel == "glu" else 1)
    operands = (tile.block_rows + cols) * tile.block_depth * dtype.itemsize
    part = tile.block_rows * (tile.block_cols // tile.parts) * result
    return tile.num_stages * operands + (2 if tile.flatten and reads else 1) * part


def _compiled_as(dtype: torch.dtype) -> torch.dtype:
    """fp16 takes what bf16 does, e5m2 what e4m3 does, and not all of it is compiled."""
    if dtype in FP8:
        return torch.float8_e4m3fn
    return torch.float32 if dtype == torch.float32 else torch.bfloat16


@cache
def _compiled() -> tuple[tuple[str, str, str, Footprint], ...]:
    """Triton's minor version, architecture, name between slashes and footprint of each entry."""
    return tuple(_rows(parsed(read_text(TABLE))))


def _rows(
    table: dict[str, dict[str, dict[str, dict[str, dict[str, int]]]]],
) -> Iterator[tuple[str, str, str, Footprint]]:
    for minor, part in table.items():
        for architecture, rows in part["rows"].items():
            for name, row in rows.items():
                yield (
                    minor,
                    architecture,
                    f"/{name}/",
                    Footprint(int(row["shared"]), int(row["registers"]), int(row.get("spills", 0))),
                )
