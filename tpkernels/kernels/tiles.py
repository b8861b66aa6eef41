"""Block sizes of each kernel: plain values, with a default for every case and a list for the tuner to try.

Rows, columns and depth of a `MatmulTile` are those of the product that the kernel computes:

    kernel    rows x cols, depth
    linear    T x N, K      y  = x wᵀ
    glu       T x N, K      two products at once, so half the columns
    dgrad     T x K, N      dx = dy w
    dglu      T x K, N      dg and du
    wgrad     N x K, T      dw = dyᵀ x
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch

from tpkernels.kernels.matmul_tile import MatmulTile as MatmulTile
from tpkernels.kernels.operands import FP8, Form
from tpkernels.kernels.target import Target
from tpkernels.kernels.triton_versions import replacement

Kernel = Literal["linear", "glu", "dgrad", "dglu", "wgrad"]
KERNELS: tuple[Kernel, ...] = get_args(Kernel)


@dataclass(frozen=True, slots=True)
class BlockTile:
    """A kernel bound by memory: a program holds a block of so many rows and columns at a time."""

    block_rows: int
    block_cols: int
    num_warps: int
    chunk: int = 32  # rows that a program sums; fixed for all GPUs, as sums depend on it
    per_processor: int = 1  # resident programs

    def __post_init__(self) -> None:
        if self.chunk % self.block_rows:
            raise ValueError(f"BlockTile expected block_rows to divide chunk, got {self}")


# Sums over rows
SUM = BlockTile(32, 128, num_warps=4, chunk=512)
# Row after row: a sum across threads takes the order of their layout, and that follows from alignment.
ORDERED_SUM = BlockTile(1, 256, num_warps=4)
INTERPRETED_SUM = BlockTile(16, 32, num_warps=4)
# Sums over slots: a program sums blocks of one matrix after the other, its slots in order
SLOT_SUM = BlockTile(16, 128, num_warps=4, per_processor=8)
# Beside a margin a processor has one program: of a larger block, so that enough bytes are on their way to it.
SLOT_SUM_ALONE = BlockTile(32, 512, num_warps=16)
INTERPRETED_SLOT_SUM = BlockTile(16, 32, num_warps=4)
# One pass over matrices: a thread has 16 elements of each; with 32 ragged rows of three matrices spill
ELEMENTS = BlockTile(32, 128, num_warps=8)
INTERPRETED_ELEMENTS = BlockTile(16, 32, num_warps=4)
# Cross-entropy: a program takes so many logits of a row at a time
LOGITS = BlockTile(1, 2048, num_warps=8)
INTERPRETED_LOGITS = BlockTile(1, 32, num_warps=4)
# Embeddings: blocks of tokens by features, looked up or added together; chunk: tokens of a row of the table
EMBEDDING = BlockTile(4, 512, num_warps=4)
EMBEDDING_GRAD = BlockTile(8, 1024, num_warps=8, chunk=128)  # many tokens may share a row
INTERPRETED_EMBEDDING = BlockTile(4, 32, num_warps=4, chunk=8)
MAX_FEATURES = 2**14  # of a norm: a row is held in the registers of one program
MAX_PLUS_FEATURES = MAX_FEATURES // 2  # where a norm's gradient is added to another: wider rows spill
MAX_SLOT_ROW = 2 * MAX_FEATURES  # bytes: a program that also adds slots would spill wider rows of fp32


def row_tile(launcher: str, features: int) -> BlockTile:
    """The tile of a norm over so many features, whose programs hold whole rows.

    Backward a program goes through a chunk of them: 32 keep partial sums to 2 % of the traffic.
    """
    if not 0 < features <= MAX_FEATURES:
        raise ValueError(
            f"{launcher}: expected 1 to {MAX_FEATURES} features, got {features}: use torch's own norm"
        )
    block_cols = max(16, 1 << (features - 1).bit_length())
    block_rows = max(1, min(16, 2048 // block_cols))
    num_warps = max(4, min(32, block_cols // 512))
    return BlockTile(block_rows, block_cols, num_warps, per_processor=32 // num_warps)


_INTERPRETED = MatmulTile(32, 32, 32, num_warps=4, num_stages=1, parts=2, group=2)

# From the fastest at large sizes to the one that splits small results over the most processors.
_DESCRIPTOR: Mapping[Kernel, tuple[MatmulTile, ...]] = {
    "linear": (
        MatmulTile(128, 256, 64, num_warps=8, num_stages=4, parts=2, flatten=True),
        MatmulTile(128, 128, 64, num_warps=4, num_stages=3, parts=2, per_processor=2),
        MatmulTile(64, 128, 64, num_warps=4, num_stages=4, parts=2, per_processor=2),
    ),
    "glu": (
        # not flattened: with two accumulators the assembler then waits for every product before the next
        MatmulTile(128, 128, 64, num_warps=8, num_stages=4, parts=2),
        MatmulTile(64, 128, 64, num_warps=4, num_stages=3, parts=2),
    ),
    "dgrad": (
        MatmulTile(128, 256, 64, num_warps=8, num_stages=3, parts=4, flatten=True),
        MatmulTile(128, 128, 64, num_warps=8, num_stages=4, parts=2, flatten=True),
        MatmulTile(64, 128, 64, num_warps=4, num_stages=4, parts=2, per_processor=2),
    ),
    "dglu": (
        MatmulTile(128, 128, 64, num_warps=8, num_stages=4, parts=4),
        MatmulTile(64, 128, 64, num_warps=4, num_stages=3, parts=4),
    ),
    "wgrad": (
        MatmulTile(128, 256, 64, num_warps=8, num_stages=4, parts=4, flatten=True),
        MatmulTile(128, 128, 64, num_warps=8, num_stages=4, parts=2, flatten=True),
    ),
}
# Of a step, where L2 bounds each processor and few have a tile: fewer bytes, and tiles for twice as many
_FEW_TOKENS = MatmulTile(64, 64, 64, num_warps=4, num_stages=4, per_processor=2)
# Timed beside these on Hopper; a launcher takes none of them by itself. Two blocks share a processor, so that
# one multiplies while the other stores; or the loop is flattened, or the depth split; or stages are more,
# or fewer, which leaves shared memory to kernels that run beside. No GPU has said yet which is faster.
_HOPPER: Mapping[Kernel, tuple[MatmulTile, ...]] = {
    "linear": (
        _FEW_TOKENS,
        MatmulTile(128, 256, 64, num_warps=8, num_stages=3, parts=2, flatten=True),
    ),
    "glu": (_FEW_TOKENS,),
    "dgrad": (
        _FEW_TOKENS,
        MatmulTile(128, 128, 64, num_warps=4, num_stages=3, parts=4, per_processor=2),
        MatmulTile(128, 256, 64, num_warps=8, num_stages=4, parts=4, flatten=True),
    ),
    "dglu": (
        _FEW_TOKENS,
        MatmulTile(128, 128, 64, num_warps=4, num_stages=3, parts=8, per_processor=2),
        MatmulTile(128, 256, 64, num_warps=8, num_stages=3, parts=4, flatten=True),
        MatmulTile(128, 128, 64, num_warps=8, num_stages=4, parts=2, flatten=True),
        MatmulTile(64, 128, 64, num_warps=4, num_stages=3, parts=4, per_processor=2),
    ),
    "wgrad": (
        MatmulTile(128, 256, 64, num_warps=8, num_stages=4, parts=4, flatten=True, splits=2),
        MatmulTile(128, 256, 64, num_warps=8, num_stages=4, parts=4, flatten=True, splits=4),
    ),
}
# kernel, tile -> epilogues that it is not shipped with. erf takes more registers than there are, and spills.
_SPILLING: Mapping[tuple[Kernel, str], tuple[str, ...]] = {
    ("dglu", "128x256x64-w8-s3-p4-flat"): ("geglu",),
    # scales in the loop take sums to registers
    ("linear", "128x256x128-w8-s3-p2-flat"): ("blocks",),
    ("linear", "128x256x128-w8-s4-p4-flat"): ("blocks",),
}
# kernel, rows of a tile of fp32, in which the wait and a third stage together make sm_90's assembler spill
_SPILLING_IF_WAITING = {("linear", 16), ("dglu", 16), ("glu", 64)}
# On Blackwell a flattened loop stages an fp32 result in shared memory whole, whatever its parts: only two
# stages would fit beside.
_BLACKWELL_WGRAD = (
    MatmulTile(128, 256, 64, num_warps=8, num_stages=4, parts=4),
    MatmulTile(128, 128, 64, num_warps=8, num_stages=4, parts=2, flatten=True),
)
_POINTER_SMALL = MatmulTile(16, 64, 64, num_warps=4, num_stages=3)
_POINTER_ONE_RESULT = (
    MatmulTile(128, 128, 32, num_warps=8, num_stages=3),
    MatmulTile(64, 64, 32, num_warps=4, num_stages=3),
    _POINTER_SMALL,
)
_POINTER_SEVERAL_RESULTS = (
    MatmulTile(64, 128, 32, num_warps=8, num_stages=3),
    MatmulTile(64, 64, 32, num_warps=8, num_stages=3),
    _POINTER_SMALL,
)
_POINTER_16_BIT: Mapping[Kernel, tuple[MatmulTile, ...]] = {
    "linear": _POINTER_ONE_RESULT,
    "glu": _POINTER_SEVERAL_RESULTS,
    "dgrad": _POINTER_ONE_RESULT,
    "dglu": _POINTER_SEVERAL_RESULTS,
    "wgrad": (MatmulTile(128, 128, 32, num_warps=8, num_stages=3), *_POINTER_SEVERAL_RESULTS[1:]),
}
# An address an element: larger tiles spill
_POINTER_RAGGED: tuple[MatmulTile, ...] = (
    MatmulTile(64, 64, 32, num_warps=8, num_stages=2),
    MatmulTile(16, 64, 32, num_warps=4, num_stages=2),
)
_POINTER_FP32: tuple[MatmulTile, ...] = (
    MatmulTile(64, 64, 16, num_warps=8, num_stages=3),
    MatmulTile(16, 64, 16, num_warps=4, num_stages=3),
)
# fp8: 128 of depth, of which tensor cores may sum no more
_DESCRIPTOR_FP8: tuple[MatmulTile, ...] = (
    MatmulTile(128, 128, 128, num_warps=8, num_stages=4, parts=2, flatten=True),
    MatmulTile(64, 128, 128, num_warps=4, num_stages=3, parts=2, per_processor=2),
)
# Timed beside these. Hopper promotes its columns in two turns; Blackwell's sums lie in memory of their own,
# and take no registers.
_HOPPER_FP8 = MatmulTile(128, 256, 128, num_warps=8, num_stages=4, parts=4, flatten=True)
_BLACKWELL_FP8 = MatmulTile(128, 256, 128, num_warps=8, num_stages=3, parts=2, flatten=True)
# Where groups of warps multiply, 64 rows at least: what takes fewer makes 16 bits of fp8 first.
_POINTER_FP8: tuple[MatmulTile, ...] = (
    MatmulTile(64, 128, 128, num_warps=8, num_stages=3),
    MatmulTile(64, 64, 128, num_warps=4, num_stages=3),
)
_POINTER_FP8_BY_WARPS: tuple[MatmulTile, ...] = (
    MatmulTile(128, 128, 64, num_warps=8, num_stages=3),
    MatmulTile(64, 64, 128, num_warps=4, num_stages=3),
    MatmulTile(16, 64, 128, num_warps=4, num_stages=3),
)


def candidates(
    kernel: Kernel, form: Form, dtype: torch.dtype, target: Target, ragged: bool = False
) -> tuple[MatmulTile, ...]:
    """Every tile that is shipped for this case: what the catalog compiles and the tuner times.

    ragged: some address or row is not 16-byte aligned, so that elements are addressed one by one
    """
    tiles = default_tiles(kernel, form, dtype, target, ragged)
    if form == "descriptor" and target.backend == "cuda":
        if dtype in FP8:
            tiles += (_HOPPER_FP8 if target.capability == 90 else _BLACKWELL_FP8,)
        elif target.capability == 90:
            tiles += _HOPPER[kernel]
    return tiles


def default_tiles(
    kernel: Kernel, form: Form, dtype: torch.dtype, target: Target, ragged: bool = False
) -> tuple[MatmulTile, ...]:
    """The candidates that a launcher takes one of, if it is not told which."""
    tiles = _default_tiles(kernel, form, dtype, target, ragged)
    return tuple(without_spills(kernel, tile) for tile in tiles)


def _default_tiles(
    kernel: Kernel, form: Form, dtype: torch.dtype, target: Target, ragged: bool
) -> tuple[MatmulTile, ...]:
    if target.backend == "interpreter":
        return (_INTERPRETED,)
    if dtype == torch.float32:
        return _POINTER_FP32
    if dtype in FP8:
        return _fp8_tiles(form, target, ragged)
    if ragged and form == "pointer":
        return _POINTER_RAGGED
    if kernel == "wgrad" and form == "descriptor" and target.capability >= 100:
        return _BLACKWELL_WGRAD
    return (_DESCRIPTOR if form == "descriptor" else _POINTER_16_BIT)[kernel]


def _fp8_tiles(form: Form, target: Target, ragged: bool) -> tuple[MatmulTile, ...]:
    if form == "descriptor":
        return _DESCRIPTOR_FP8
    if ragged:
        return _POINTER_RAGGED[:1] if target.has_tma else _POINTER_RAGGED
    return _POINTER_FP8 if target.has_tma else _POINTER_FP8_BY_WARPS


def serves(kernel: Kernel, tile: MatmulTile, options: Container[str]) -> bool:
    """Whether a shipped tile is one for this epilogue; `options` names activation or gate."""
    spills = _SPILLING.get((kernel, tile.name), ())
    return not any(option in options for option in spills)


def default_tile(
    kernel: Kernel,
    form: Form,
    dtype: torch.dtype,
    target: Target,
    rows: int,
    cols: int,
    ragged: bool = False,
) -> MatmulTile:
    """The first default that occupies every processor, else the one that occupies the most."""
    tiles = default_tiles(kernel, form, dtype, target, ragged)
    filling = (tile for tile in tiles if tile.tiles(rows, cols) >= target.processors)
    return next(filling, max(tiles, key=lambda tile: tile.tiles(rows, cols)))


def sum_tile(form: Form, dtype: torch.dtype, target: Target, ragged: bool = False) -> MatmulTile:
    """The tile of products whose results are fp32 sums: wgrad's, which has the shared memory for them.

    One for all sizes: such results are added to those of other ranks, whose sizes may be others.
    """
    return default_tiles("wgrad", form, dtype, target, ragged)[0]


def waiting_tile(kernel: Kernel, tile: MatmulTile, chunk_rows: int) -> MatmulTile:
    """A tile for rows that arrive in chunks: what is computed at once wants the same chunk."""
    group = min(tile.group, max(1, chunk_rows // tile.block_rows))
    spills = tile.block_depth == 16 and (kernel, tile.block_rows) in _SPILLING_IF_WAITING
    stages = min(tile.num_stages, 2) if spills else tile.num_stages
    return replace(tile, flatten=False, group=group, num_stages=stages)


def without_spills(kernel: Kernel | Literal["dgrad_pairs"], tile: MatmulTile) -> MatmulTile:
    """The tile, or the one in its place where this version of Triton would spill.

    dgrad_pairs: takes the tiles of `dgrad`
    """
    name = tile.name
    other = replacement(kernel, name)
    return tile if other == name else MatmulTile.named(other)


def pushing_tile(tile: MatmulTile, others: tuple[MatmulTile, ...], chunk_rows: int) -> MatmulTile:
    """A tile of `linear` for rows that leave in chunks; no chunk shares a tile with the next.

    It is `tile`, unless one of the others computes a quarter fewer rows, beyond the ends of chunks, too.
    """

    def computed(one: MatmulTile) -> int:
        return -(-chunk_rows // one.block_rows) * one.block_rows

    fewer = (other for other in others if tile in others and 4 * computed(other) <= 3 * computed(tile))
    return replace(next(fewer, tile), flatten=False)


def chunk_tiles(
    kernel: Kernel,
    form: Form,
    dtype: torch.dtype,
    target: Target,
    rows: int,
    cols: int,
    chunk_rows: int,
    *,
    waits: bool,
) -> tuple[MatmulTile, ...]:
    """Tiles of a kernel that waits for chunks, or stores them; first the one that it takes untold."""
    usual = default_tile(kernel, form, dtype, target, rows, cols)
    others = default_tiles(kernel, form, dtype, target)
    if waits:
        found = [waiting_tile(kernel, tile, chunk_rows) for tile in (usual, *others)]
    else:
        found = [pushing_tile(usual, others, chunk_rows), *(replace(tile, flatten=False) for tile in others)]
    return tuple(dict.fromkeys(found))
