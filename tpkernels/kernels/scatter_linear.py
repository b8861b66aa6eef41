"""`Σ a wᵀ` whose rows belong to other ranks: each tile is stored where its owner reads it.

R ranks, T tokens, N features, one or two pairs of a (T, K) and w (N, K), each pair with its own K:

    p = Σ over pairs of a wᵀ    (T, N)    accumulated in fp32 over all pairs, rounded once

Rank d owns T / R rows of p, its shard, which is cut into `splits` equal chunks. The kernel goes round the
ring: first come the rows of rank - 1, then those of rank - 2, ..., its own last. A tile has rows of one chunk
only, and the program that stores the last tile of a chunk raises the chunk's flag at the owner.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpkernels.kernels import launch
from tpkernels.kernels.blocks import add_products, split_columns, store_block, tile_at
from tpkernels.kernels.launch_plans import planned
from tpkernels.kernels.operands import Form, lies_depth_first, require_matrices, require_shape
from tpkernels.kernels.target import left_free, resident_programs
from tpkernels.kernels.tiles import MatmulTile, default_tiles, pushing_tile
from tpkernels.kernels.waits import Departures, require_departures

Pair = tuple[Tensor, Tensor]
_TRITON_DTYPE = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def _scatter_linear_kernel(
    a,  # (T, K), like every matrix here a tensor descriptor if TMA, else a pointer
    w,  # (N, K), or (K, N) if DEPTH_FIRST
    a2,  # the second pair, of depth K2; unread unless TWO_PAIRS
    w2,
    slots_ptr,  # (R,) int64: addresses of (splits * chunk_rows, N) contiguous, by owner
    flags_ptr,  # (R,) int64: addresses of (splits,) int32, by owner
    counters_ptr,  # (R * splits,) int32, zeros before and after: tiles stored of each chunk
    awaited_ptr,  # (1,) int32
    T,
    N,
    K,
    K2,
    stride_at,
    stride_ak,
    stride_wn,
    stride_wk,
    stride_a2t,
    stride_a2k,
    stride_w2n,
    stride_w2k,
    R,
    rank,
    splits,
    chunk_rows,
    chunk_tiles,
    DTYPE: tl.constexpr,  # of p
    ALIGNED: tl.constexpr,  # whether the rows of slots start at multiples of 16 bytes
    TWO_PAIRS: tl.constexpr,
    DEPTH_FIRST: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    FLATTEN: tl.constexpr,
    TMA: tl.constexpr,
):
    """Each program computes every num_programs-th tile, chunk by chunk."""
    # one loop over tiles and depth would hold the barrier, and so load nothing ahead
    tl.static_assert(not FLATTEN, "a flattened loop waits for each load")
    PART: tl.constexpr = BLOCK_COLS // PARTS
    row_tiles = tl.cdiv(chunk_rows, BLOCK_ROWS)
    col_tiles = tl.cdiv(N, BLOCK_COLS)
    for index in tl.range(tl.program_id(0), R * splits * chunk_tiles, tl.num_programs(0)):
        chunk = index // chunk_tiles  # as they are computed
        owner = (rank + R - 1 - chunk // splits) % R
        part = chunk % splits
        row_tile, col_tile = tile_at(index % chunk_tiles, row_tiles, col_tiles, GROUP)
        row = row_tile * BLOCK_ROWS  # of the chunk
        n = col_tile * BLOCK_COLS
        first_row = (owner.to(tl.int64) * splits + part) * chunk_rows  # of the chunk, in a
        t = first_row + row
        if TMA:
            t = t.to(tl.int32)  # which coordinates are
        acc = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
        acc = add_products(
            *(acc, a, w, t, n, T, N, K, stride_at, stride_ak, stride_wn, stride_wk),
            *(DEPTH_FIRST, PRECISION, BLOCK_DEPTH, TMA),
        )
        if TWO_PAIRS:
            acc = add_products(
                *(acc, a2, w2, t, n, T, N, K2, stride_a2t, stride_a2k, stride_w2n, stride_w2k),
                *(DEPTH_FIRST, PRECISION, BLOCK_DEPTH, TMA),
            )
        slot_ptr = tl.load(slots_ptr + owner).to(tl.pointer_type(DTYPE))
        if ALIGNED:
            slot_ptr = tl.multiple_of(slot_ptr, 16)
        slot_ptr += part.to(tl.int64) * chunk_rows * N
        parts = split_columns(acc, PARTS)
        for p in tl.static_range(PARTS):
            store_block(slot_ptr, parts[p], row, n + p * PART, chunk_rows, N, N, 1, TMA=False)
        # Each thread has stored some of the tile. The barrier orders all of it before the counter, which one
        # thread counts up; each count of a chunk follows the one before, and the flag follows the last: so
        # whoever sees the flag sees the chunk. All of them are ordered for the whole system, as the reader is
        # another GPU.
        tl.debug_barrier()
        stored = tl.atomic_add(counters_ptr + chunk, 1, sem="acq_rel", scope="sys")
        if stored == chunk_tiles - 1:
            # nobody else counts here any more, and the next launch comes after this one
            tl.atomic_xchg(counters_ptr + chunk, 0, sem="relaxed", scope="gpu")
            flag_ptr = tl.load(flags_ptr + owner).to(tl.pointer_type(tl.int32))
            tl.atomic_xchg(flag_ptr + part, tl.load(awaited_ptr), sem="release", scope="sys")


@planned
def scatter_linear(
    pairs: tuple[Pair, ...],
    *,
    departures: Departures,
    ranks: int,
    rank: int,
    splits: int = 1,
    margin: int = 0,
    tile: MatmulTile | None = None,
    form: Form | None = None,
) -> None:
    """Store Σ a weightᵀ into the owners' slots, in the dtype of a, and raise the flag of each chunk.

    pairs: one or two of a (tokens, in_features) and weight (out_features, in_features). For dy weight pass
        `weight.t()`: that is read as it lies
    splits: equal chunks of each rank's rows
    margin: processors that are left to kernels which run at the same time
    """
    _require_pairs(pairs)
    (a, w), (a2, w2) = pairs[0], pairs[-1]
    (T, K), N, K2 = a.shape, w.shape[0], a2.shape[1]
    require_departures("scatter_linear", departures, ranks, rank, splits, a.device)
    if T % (ranks * splits):
        raise ValueError(
            f"scatter_linear: expected tokens that {ranks} ranks times {splits} chunks divide, got {T}"
        )
    depth_first = all(lies_depth_first(weight) for _, weight in pairs)
    matrices = tuple(
        named
        for left, weight in pairs
        for named in (("a", left), ("weight", weight.t() if depth_first else weight))
    )
    product = launch.product("scatter_linear", "linear", matrices, (T, N), tile, form)
    if not T * N:
        return  # and nobody waits for it
    chunk_rows = T // (ranks * splits)
    if tile is None:
        others = default_tiles("linear", product.form, a.dtype, product.target)
        product = product._replace(tile=pushing_tile(product.tile, others, chunk_rows))
    elif tile.flatten:
        raise ValueError(
            "scatter_linear: expected a tile with flatten=False: its barrier ends that loop's loads"
        )
    chunk_tiles = product.tile.tiles(chunk_rows, N)
    a_operands = [product.block(left, "rows", "depth") for left, _ in pairs]
    w_operands = [
        product.block(weight.t(), "depth", "cols") if depth_first else product.block(weight, "cols", "depth")
        for _, weight in pairs
    ]
    programs = resident_programs(
        "scatter_linear", product.target, product.tile.per_processor, left_free(product.target, margin)
    )
    product = product._replace(programs=min(ranks * splits * chunk_tiles, programs))
    product.start(_scatter_linear_kernel)(
        a_operands[0],
        w_operands[0],
        a_operands[-1],
        w_operands[-1],
        departures.slots,
        departures.flags,
        departures.counters,
        departures.awaited,
        T,
        N,
        K,
        K2,
        *a.stride(),
        *w.stride(),
        *a2.stride(),
        *w2.stride(),
        ranks,
        rank,
        splits,
        chunk_rows,
        chunk_tiles,
        DTYPE=_TRITON_DTYPE[a.dtype],
        ALIGNED=N * a.element_size() % 16 == 0,
        TWO_PAIRS=len(pairs) == 2,
        DEPTH_FIRST=depth_first,
        PRECISION=product.precision,
    )


def _require_pairs(pairs: tuple[Pair, ...]) -> None:
    if len(pairs) not in (1, 2):
        raise ValueError(f"scatter_linear: expected one or two pairs of (a, weight), got {len(pairs)}")
    require_matrices(
        "scatter_linear",
        *((name, matrix) for pair in pairs for name, matrix in zip(("a", "weight"), pair, strict=True)),
    )
    T, N = pairs[0][0].shape[0], pairs[0][1].shape[0]
    for a, weight in pairs:
        K = a.shape[1]
        require_shape("scatter_linear", "a", a, (T, K), "(tokens, in_features), as many tokens in each pair")
        why = f"(out_features, in_features) for a {tuple(a.shape)}"
        require_shape("scatter_linear", "weight", weight, (N, K), why)
