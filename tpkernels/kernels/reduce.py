"""The sum of slots, in fp32 and in a fixed order: the tail of a reduce-scatter, and of a product in parts.

R slots, T tokens, N features:

    y  = Σ over r of slots[r] + b    (T, N)    `reduce_slots`: what each rank contributed, whenever it arrived
    y += Σ over r of slots[r]        (T, N)    `add_slots`: what each part of a product's depth did

Slots are added in the order of r, or on request in a binary tree, as `tp_invariance.tree_sum` adds, and the
sum is rounded once. The bias lands here, once, and not in the R products that are summed. One slot may be of
int32 words: the sum is a copy then, bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpkernels.kernels import launch
from tpkernels.kernels.blocks import load_block, load_vector, store_block
from tpkernels.kernels.launch_plans import planned
from tpkernels.kernels.operands import DTYPES, require_tensors
from tpkernels.kernels.target import left_free, resident_programs, target_of
from tpkernels.kernels.tiles import INTERPRETED_SLOT_SUM, SLOT_SUM, SLOT_SUM_ALONE, BlockTile
from tpkernels.kernels.waits import Arrivals, require_arrivals, wait_for


@triton.jit
def _wait_for_rows(
    t,
    T,
    slot_chunk,  # the first flag of the slot
    splits,
    flags_ptr,
    awaited_ptr,
    status_ptr,
    spin_limit,
    BLOCK_ROWS: tl.constexpr,
):
    """Until the flags of all parts of a slot are up that a block of rows reaches into."""
    part_rows = T // splits
    first_part = t // part_rows
    last_part = (tl.minimum(t + BLOCK_ROWS, T) - 1) // part_rows
    # the last by itself: a loop alone would leave the code, and the gate, a way around the wait
    for part in tl.range(first_part, last_part, num_stages=1):
        chunk = slot_chunk + part
        wait_for(chunk, flags_ptr, awaited_ptr, status_ptr, spin_limit, OP=2, ASYNC_PROXY=False)
    chunk = slot_chunk + last_part
    wait_for(chunk, flags_ptr, awaited_ptr, status_ptr, spin_limit, OP=2, ASYNC_PROXY=False)


@triton.jit
def _tree_sum(
    slot_ptr,  # of the first of SLOTS slots
    t,
    n,
    T,
    N,
    stride_sr,
    stride_st,
    stride_sn,
    slot_chunk,
    splits,
    flags_ptr,
    awaited_ptr,
    status_ptr,
    spin_limit,
    WAIT: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """A block of the sum of SLOTS slots: of the left half of them, plus that of the right half."""
    if SLOTS == 1:
        if WAIT:
            _wait_for_rows(
                t, T, slot_chunk, splits, flags_ptr, awaited_ptr, status_ptr, spin_limit, BLOCK_ROWS
            )
        block = load_block(slot_ptr, t, n, T, N, stride_st, stride_sn, BLOCK_ROWS, BLOCK_COLS, TMA=False)
        return block.to(tl.float32)
    else:
        HALF: tl.constexpr = SLOTS // 2
        left = _tree_sum(
            *(slot_ptr, t, n, T, N, stride_sr, stride_st, stride_sn, slot_chunk, splits),
            *(flags_ptr, awaited_ptr, status_ptr, spin_limit, WAIT, HALF, BLOCK_ROWS, BLOCK_COLS),
        )
        slot_ptr += HALF * tl.cast(stride_sr, tl.int64)
        slot_chunk += HALF * splits
        right = _tree_sum(
            *(slot_ptr, t, n, T, N, stride_sr, stride_st, stride_sn, slot_chunk, splits),
            *(flags_ptr, awaited_ptr, status_ptr, spin_limit, WAIT, HALF, BLOCK_ROWS, BLOCK_COLS),
        )
        return left + right


@triton.jit
def _reduce_slots_kernel(
    slots_ptr,  # (R, T, N); one slot, if it is of int32
    b_ptr,  # (N,), unread unless HAS_BIAS
    y_ptr,  # (T, N) contiguous
    flags_ptr,  # (R * splits,) int32, slot by slot; like the next two untouched unless WAIT
    awaited_ptr,  # (1,) int32
    status_ptr,  # (1,) int32
    R,
    T,
    N,
    stride_sr,
    stride_st,
    stride_sn,
    stride_bn,
    first_chunk,  # the first flag that belongs to the slots
    splits,  # equal parts of a slot's rows, which arrive one by one
    spin_limit,
    HAS_BIAS: tl.constexpr,
    WAIT: tl.constexpr,
    TREE: tl.constexpr,  # slots that are added in a tree; 0: R of them, one after the other
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """Each program sums every num_programs-th block."""
    wide: tl.constexpr = tl.int32 if slots_ptr.dtype.element_ty == tl.int32 else tl.float32
    col_tiles = tl.cdiv(N, BLOCK_COLS)
    for index in tl.range(tl.program_id(0), tl.cdiv(T, BLOCK_ROWS) * col_tiles, tl.num_programs(0)):
        t = index // col_tiles * BLOCK_ROWS
        n = index % col_tiles * BLOCK_COLS
        if TREE:
            acc = _tree_sum(
                *(slots_ptr, t, n, T, N, stride_sr, stride_st, stride_sn, first_chunk, splits),
                *(flags_ptr, awaited_ptr, status_ptr, spin_limit, WAIT, TREE, BLOCK_ROWS, BLOCK_COLS),
            )
        else:
            acc = tl.zeros((BLOCK_ROWS, BLOCK_COLS), wide)
            slot_ptr = slots_ptr
            slot_chunk = first_chunk
            for _ in tl.range(0, R, num_stages=1):
                if WAIT:
                    _wait_for_rows(
                        t, T, slot_chunk, splits, flags_ptr, awaited_ptr, status_ptr, spin_limit, BLOCK_ROWS
                    )
                acc += load_block(
                    slot_ptr, t, n, T, N, stride_st, stride_sn, BLOCK_ROWS, BLOCK_COLS, TMA=False
                ).to(wide)
                slot_ptr += stride_sr
                slot_chunk += splits
        if HAS_BIAS:
            acc += load_vector(b_ptr, n, N, stride_bn, BLOCK_COLS)[None, :]
        store_block(y_ptr, acc, t, n, T, N, N, 1, TMA=False)


@planned
def reduce_slots(
    slots: Tensor,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    arrivals: Arrivals | None = None,
    chunks: range | None = None,
    margin: int = 0,
    tree: bool = False,
    tile: BlockTile | None = None,
) -> Tensor:
    """The sum of the slots, plus the bias once, rounded once.

    slots: (ranks, tokens, features); one, which is copied, may be of int32 words
    bias: (features,)
    dtype: of the result, by default that of the slots
    arrivals: a flag for each slot, or for each of its equal parts of rows; by default all is here
    chunks: the flags that belong to the slots; by default all
    margin: processors that are left to those who write the slots
    tree: neighbours are added first, then neighbours of these sums, and so on
    returns: (tokens, features)
    """
    words = slots.dtype == torch.int32
    if words and (len(slots) != 1 or bias is not None or dtype is not None):
        raise TypeError(
            f"reduce_slots: expected one slot of int32 words, to be copied, got slots {tuple(slots.shape)}, "
            f"bias {bias is not None} and dtype {dtype}: words are not numbers, and have no sum"
        )
    if not words:
        require_tensors("reduce_slots", ("slots", slots), ("bias", bias))
    if slots.ndim != 3 or not slots.shape[0]:
        raise ValueError(
            f"reduce_slots: expected slots of (ranks, tokens, features), got {tuple(slots.shape)}"
        )
    R, T, N = slots.shape
    if tree and R & (R - 1):
        raise ValueError(f"reduce_slots: expected a power of two of slots to add in a tree, got {R}")
    if bias is not None and tuple(bias.shape) != (N,):
        raise ValueError(f"reduce_slots: expected bias of {(N,)} for {N} features, got {tuple(bias.shape)}")
    if dtype not in (None, *DTYPES):
        raise TypeError(f"reduce_slots: expected bfloat16, float16 or float32 as dtype, got {dtype}")
    first_chunk, splits = (0, 1) if arrivals is None else _first_and_splits(arrivals, chunks, slots)
    target = target_of(slots.device)
    if tile is None and target.backend == "interpreter":
        tile = INTERPRETED_SLOT_SUM
    free = left_free(target, margin)
    tile = tile or (SLOT_SUM_ALONE if free and not tree else SLOT_SUM)  # in a tree it would spill
    programs = resident_programs("reduce_slots", target, tile.per_processor, free)
    # words are made as fp32, of which tests see what was not written
    y = launch.empty((T, N), torch.float32 if words else dtype or slots.dtype, slots.device)
    y = y.view(torch.int32) if words else y
    if y.numel():
        tiles = launch.ceil_div(T, tile.block_rows) * launch.ceil_div(N, tile.block_cols)
        unread = y  # stands for a pointer that this form of the kernel does not follow
        launch.on(slots.device, _reduce_slots_kernel, (min(tiles, programs),))(
            slots,
            unread if bias is None else bias,
            y,
            unread if arrivals is None else arrivals.flags,
            unread if arrivals is None else arrivals.awaited,
            unread if arrivals is None else arrivals.status,
            R,
            T,
            N,
            *slots.stride(),
            0 if bias is None else bias.stride(0),
            first_chunk,
            splits,
            0 if arrivals is None else arrivals.limit(target),
            HAS_BIAS=bias is not None,
            WAIT=arrivals is not None,
            TREE=R if tree and not words else 0,
            BLOCK_ROWS=tile.block_rows,
            BLOCK_COLS=tile.block_cols,
            num_warps=tile.num_warps,
        )
    return y


@triton.jit
def _add_slots_kernel(
    slots_ptr,  # (SLOTS, T, N)
    y_ptr,  # (T, N)
    T,
    N,
    stride_sr,
    stride_st,
    stride_sn,
    stride_yt,
    stride_yn,
    ACCUMULATE: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """One program sums one block."""
    t = tl.program_id(0) * BLOCK_ROWS
    n = tl.program_id(1) * BLOCK_COLS
    acc = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
    slot_ptr = slots_ptr
    for _ in tl.static_range(SLOTS):
        acc += load_block(slot_ptr, t, n, T, N, stride_st, stride_sn, BLOCK_ROWS, BLOCK_COLS, TMA=False)
        slot_ptr += stride_sr
    if ACCUMULATE:
        old = load_block(y_ptr, t, n, T, N, stride_yt, stride_yn, BLOCK_ROWS, BLOCK_COLS, TMA=False)
        acc += old.to(tl.float32)
    store_block(y_ptr, acc, t, n, T, N, stride_yt, stride_yn, TMA=False)


def add_slots(y: Tensor, slots: Tensor, *, accumulate: bool) -> None:
    """Write the sum of the slots into y, or add it to what y holds; rounded once.

    y: (tokens, features), of any dtype and strides
    slots: (parts, tokens, features) in fp32
    """
    SLOTS, T, N = slots.shape
    tile = INTERPRETED_SLOT_SUM if target_of(y.device).backend == "interpreter" else SLOT_SUM
    blocks = launch.ceil_div(T, tile.block_rows), launch.ceil_div(N, tile.block_cols)
    launch.on(y.device, _add_slots_kernel, blocks)(
        slots,
        y,
        T,
        N,
        *slots.stride(),
        *y.stride(),
        ACCUMULATE=accumulate,
        SLOTS=SLOTS,
        BLOCK_ROWS=tile.block_rows,
        BLOCK_COLS=tile.block_cols,
        num_warps=tile.num_warps,
    )


def _first_and_splits(arrivals: Arrivals, chunks: range | None, slots: Tensor) -> tuple[int, int]:
    require_arrivals("reduce_slots", arrivals, slots.device)
    (R, T, _), flags = slots.shape, arrivals.flags.numel()
    chunks = range(flags) if chunks is None else chunks
    if chunks.step != 1 or chunks.start < 0 or chunks.stop > flags:
        raise ValueError(f"reduce_slots: expected chunks among {flags} flags, got {chunks}")
    if not chunks or len(chunks) % R or T % (len(chunks) // R):
        raise ValueError(
            f"reduce_slots: expected {R} slots of {T} rows to be cut evenly by their flags, got "
            f"{len(chunks)} flags"
        )
    return chunks.start, len(chunks) // R
