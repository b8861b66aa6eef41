"""What a warp-specialised product is compiled for, and how it fills shared memory: plain values, no Triton.

    operands   `stages` buffers of a block of each operand; of a pair, each has its half of the rows, and of
               the columns, too, where sums lie in tensor memory
    inputs     `slots` buffers of a part of what the epilogue reads, if it reads
    staging    `staging` buffers of a part for each consumer, from which results leave

Operands come first: as many stages as the tile says. Two staging buffers are kept for each consumer. Inputs
get as many slots as a tile has parts, if they fit, so that all are fetched while its products run. Staging
takes what is left, up to four buffers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

from tpkernels.kernels.tiles import MatmulTile

Epilogue = Literal["linear", "glu", "dgrad", "dglu", "wgrad"]
BARRIERS = 256  # bytes, at least: two or three of 8 bytes for each buffer of two rings, and their alignment
VECTOR = 1024  # bytes for each consumer: the bias of a tile in fp32, or room to add its rows


@dataclass(frozen=True, slots=True)
class ProductConstants:
    """All constants of a warp-specialised product.

    Fields, and no properties: of these alone Triton's cache of compiled kernels knows.
    """

    epilogue: Epilogue
    activation: str
    vector: bool  # whether there is a bias to add, or one whose gradient is summed
    pairs: int  # of matrices whose products are summed
    inputs: int  # matrices that the epilogue reads
    outputs: int  # matrices that it writes
    fast: bool  # see `kernels.epilogues`
    blocks: int  # 2: a pair, of which each block computes half of the rows
    block_rows: int  # of all blocks together
    block_cols: int
    block_depth: int
    parts: int
    group: int
    consumers: int
    stages: int
    slots: int
    staging: int
    part: int  # columns that the epilogue works on at a time
    width: int  # columns of the accumulator
    two_weights: bool  # whether they lie side by side, and so do their products
    depth_first: bool  # whether a weight is (depth, cols)
    across: bool  # whether a is (depth, rows)
    adds: bool  # whether the copy engine adds results to what is there
    tensor_memory: bool  # whether sums lie there, and a pair multiplies together: see `tensor_memory`


@cache
def constants_of(
    tile: MatmulTile,
    shared_memory: int,
    epilogue: Epilogue,
    *,
    activation: str = "none",
    vector: bool = False,
    pairs: int = 1,
    inputs: int = 0,
    outputs: int = 1,
    fast: bool = True,
    itemsize: int = 2,
    adds: bool = False,
    tensor_memory: bool = False,
) -> ProductConstants:
    """The constants of a product of 16-bit matrices with this tile; ValueError if it does not fit.

    shared_memory: bytes that a program can have
    itemsize: of results, and of what the epilogue reads
    """
    if tile.num_stages < 2:
        raise ValueError(
            f"{epilogue}: expected at least 2 stages, for a buffer is released a step late, got {tile.name}"
        )
    two_weights = epilogue == "glu"
    width = tile.block_cols * (2 if two_weights else 1)
    rows = tile.block_rows // tile.blocks
    columns = width // tile.blocks if tensor_memory else width
    stage = 2 * (rows + columns) * tile.block_depth
    part = tile.block_cols // tile.parts
    part_bytes = itemsize * rows * part
    consumers = tile.consumers
    left = shared_memory - BARRIERS - VECTOR * consumers * vector - tile.num_stages * stage
    slots = min(tile.parts, (left // part_bytes - 2 * consumers) // inputs) if inputs else 0
    # of which the stores of a tile are a multiple: each tile then begins with the buffer that was used first
    stores = tile.parts * outputs
    room = left // part_bytes - slots * inputs
    staging = next((n for n in (4, 3, 2, 1) if stores % n == 0 and n * consumers <= room), 0)
    if not staging or (inputs and slots < 1):
        raise ValueError(f"{epilogue}: expected a tile of at most {shared_memory:,} bytes, got {tile.name}")
    return ProductConstants(
        epilogue=epilogue,
        activation=activation,
        vector=vector,
        pairs=pairs,
        inputs=inputs,
        outputs=outputs,
        fast=fast,
        blocks=tile.blocks,
        block_rows=tile.block_rows,
        block_cols=tile.block_cols,
        block_depth=tile.block_depth,
        parts=tile.parts,
        group=tile.group,
        consumers=consumers,
        stages=tile.num_stages,
        slots=slots,
        staging=staging,
        part=part,
        width=width,
        two_weights=two_weights,
        depth_first=epilogue in ("dgrad", "dglu", "wgrad"),
        across=epilogue == "wgrad",
        adds=adds,
        tensor_memory=tensor_memory,
    )
