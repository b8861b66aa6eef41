"""The sum of slots, in fp32 and in a fixed order: the tail of a reduce-scatter, and of a product in parts.

R slots, T tokens, N features:

    y  = Σ over r of slots[r] + b    (T, N)    `reduce_slots`: what each rank contributed, whenever it arrived
    y += Σ over r of slots[r]        (T, N)    `add_slots`: what each part of a product's depth did
    h  = y + residual, norm(h)       (T, N)    `add_norm`: y is never written

Slots are added in the order of r, or on request in a binary tree, as `tp_invariance.tree_sum` adds, and the
sum is rounded once. The bias lands here, once, and not in the R products that are summed. One slot may be of
int32 words: the sum is a copy then, bit for bit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpkernels.kernels import launch
from tpkernels.kernels.blocks import load_block, load_vector, store_block
from tpkernels.kernels.launch_plans import planned
from tpkernels.kernels.norm import scaled_rows
from tpkernels.kernels.operands import (
    DTYPES,
    require_matrices,
    require_parameter,
    require_shape,
    require_tensors,
)
from tpkernels.kernels.target import Target, left_free, resident_programs, target_of
from tpkernels.kernels.tiles import INTERPRETED_SLOT_SUM, SLOT_SUM, SLOT_SUM_ALONE, BlockTile, row_tile
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
    y_ptr,  # (T, N) contiguous; with a residual h
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
    BLOCK_COLS: tl.constexpr,  # with a residual at least N
    residual_ptr=None,  # (T, N), and what `_norm_fwd_kernel` takes; None: neither residual nor norm
    weight_ptr=None,
    norm_bias_ptr=None,  # None: the norm has no bias
    normed_ptr=None,
    mean_ptr=None,
    rstd_ptr=None,
    stride_rt=None,
    stride_rn=None,
    stride_wn=None,
    stride_norm_bn=None,
    eps=None,
    CENTRE: tl.constexpr = None,
):
    """Each program sums every num_programs-th block."""
    if residual_ptr is not None:
        tl.assume(R > 0)  # no way around the waits to the residual, for the compiler and the gate
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
        if residual_ptr is not None:
            # rounded as if sum and h were written and read again: the bits of three passes
            dtype: tl.constexpr = y_ptr.dtype.element_ty
            residual = load_block(
                residual_ptr, t, n, T, N, stride_rt, stride_rn, BLOCK_ROWS, BLOCK_COLS, TMA=False
            )
            acc = acc.to(slots_ptr.dtype.element_ty).to(dtype).to(tl.float32) + residual.to(tl.float32)
            acc = acc.to(dtype).to(tl.float32)
            rows, cols = t + tl.arange(0, BLOCK_ROWS).to(tl.int64), tl.arange(0, BLOCK_COLS).to(tl.int64)
            mask = (rows < T)[:, None] & (cols < N)[None, :]
            x = acc
            if CENTRE:
                mean = tl.sum(acc, axis=1) / N
                x = tl.where(mask, acc - mean[:, None], 0.0)
            rstd = 1.0 / tl.sqrt_rn(tl.sum(x * x, axis=1) / N + eps)
            HAS_NORM_BIAS: tl.constexpr = norm_bias_ptr is not None
            normed = scaled_rows(
                x, rstd, cols, weight_ptr, norm_bias_ptr, N, stride_wn, stride_norm_bn, HAS_NORM_BIAS
            )
            # after all loads: a store ends what flags allow to read
            if CENTRE:
                tl.store(mean_ptr + rows, mean, rows < T)
            tl.store(rstd_ptr + rows, rstd, rows < T)
            tl.store(normed_ptr + rows[:, None] * N + cols[None, :], normed.to(dtype), mask)
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
    if dtype not in (None, *DTYPES):
        raise TypeError(f"reduce_slots: expected bfloat16, float16 or float32 as dtype, got {dtype}")
    _, T, N = _require_slots("reduce_slots", slots, bias, tree)
    target = target_of(slots.device)
    if tile is None and target.backend == "interpreter":
        tile = INTERPRETED_SLOT_SUM
    free = left_free(target, margin)
    tile = tile or (SLOT_SUM_ALONE if free and not tree else SLOT_SUM)  # in a tree it would spill
    # words are made as fp32, of which tests see what was not written
    y = launch.empty((T, N), torch.float32 if words else dtype or slots.dtype, slots.device)
    y = y.view(torch.int32) if words else y
    _sum_slots("reduce_slots", slots, bias, y, arrivals, chunks, target, free, tree and not words, tile)
    return y


def _require_slots(launcher: str, slots: Tensor, bias: Tensor | None, tree: bool) -> tuple[int, int, int]:
    """Return the shape of slots."""
    if slots.ndim != 3 or not slots.shape[0]:
        raise ValueError(f"{launcher}: expected slots of (ranks, tokens, features), got {tuple(slots.shape)}")
    R, T, N = slots.shape
    if tree and R & (R - 1):
        raise ValueError(f"{launcher}: expected a power of two of slots to add in a tree, got {R}")
    if bias is not None and tuple(bias.shape) != (N,):
        raise ValueError(f"{launcher}: expected bias of {(N,)} for {N} features, got {tuple(bias.shape)}")
    return R, T, N


def _sum_slots(
    launcher: str,
    slots: Tensor,
    bias: Tensor | None,
    y: Tensor,
    arrivals: Arrivals | None,
    chunks: range | None,
    target: Target,
    free: int,
    tree: bool,
    tile: BlockTile,
    *norm: Tensor | float | None,
) -> None:
    """Launch the kernel. free: processors without a program; norm: its arguments from `residual_ptr` on"""
    R, T, N = slots.shape
    first_chunk, splits = (0, 1) if arrivals is None else _first_and_splits(launcher, arrivals, chunks, slots)
    programs = resident_programs(launcher, target, tile.per_processor, free)
    if not y.numel():
        return
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
        bias is not None,
        arrivals is not None,
        R if tree else 0,
        tile.block_rows,
        tile.block_cols,
        *norm,
        num_warps=tile.num_warps,
    )


class AddNorm(NamedTuple):
    """What `add_norm` returns."""

    h: Tensor  # (tokens, features)
    y: Tensor  # (tokens, features), the norm of h
    mean: Tensor | None  # (tokens,) in fp32, of h; RMSNorm has none
    rstd: Tensor  # (tokens,) in fp32


@planned
def add_norm(
    slots: Tensor,
    residual: Tensor,
    weight: Tensor,
    norm_bias: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    centre: bool = False,
    arrivals: Arrivals | None = None,
    chunks: range | None = None,
    margin: int = 0,
    tile: BlockTile | None = None,
) -> AddNorm:
    """h = the sum of the slots, plus bias, plus residual; and the norm of h. In the dtype of residual.

    The bits of h are those of `reduce_slots`, rounded to that dtype, and an addition. Those of the norm may
    differ from `rms_norm_fwd`'s on a GPU: sums over a row follow the layout of what is loaded.

    slots: (ranks, tokens, features); or the sum, (tokens, features)
    residual: (tokens, features), in the dtype of slots or another
    weight, norm_bias: (features,), in the dtype of residual or fp32
    centre: LayerNorm; else RMSNorm
    Others as in `reduce_slots`.
    """
    require_tensors("add_norm", ("slots", slots), ("bias", bias))
    require_matrices("add_norm", ("residual", residual))
    one = slots.ndim == 2
    slots = slots[None] if one else slots
    _, T, N = _require_slots("add_norm", slots, bias, False)
    require_shape("add_norm", "residual", residual, (T, N), "that of a slot")
    require_parameter("add_norm", "weight", weight, residual)
    if norm_bias is not None:
        require_parameter("add_norm", "norm_bias", norm_bias, residual)
    tile = tile or row_tile("add_norm", N)
    target = target_of(slots.device)
    h, y = (launch.empty((T, N), residual.dtype, residual.device) for _ in range(2))
    mean = launch.empty((T,), torch.float32, residual.device) if centre else None
    rstd = launch.empty((T,), torch.float32, residual.device)
    # a tree of one slot keeps the signs of zeros
    _sum_slots(
        "add_norm", slots, bias, h, arrivals, chunks, target, left_free(target, margin), one, tile,
        residual, weight, norm_bias, y, mean, rstd, *residual.stride(), weight.stride(0),
        None if norm_bias is None else norm_bias.stride(0), eps, centre,
    )  # fmt: skip
    return AddNorm(h, y, mean, rstd)


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


def _first_and_splits(
    launcher: str, arrivals: Arrivals, chunks: range | None, slots: Tensor
) -> tuple[int, int]:
    require_arrivals(launcher, arrivals, slots.device)
    (R, T, _), flags = slots.shape, arrivals.flags.numel()
    chunks = range(flags) if chunks is None else chunks
    if chunks.step != 1 or chunks.start < 0 or chunks.stop > flags:
        raise ValueError(f"{launcher}: expected chunks among {flags} flags, got {chunks}")
    if not chunks or len(chunks) % R or T % (len(chunks) // R):
        raise ValueError(
            f"{launcher}: expected {R} slots of {T} rows to be cut evenly by their flags, got "
            f"{len(chunks)} flags"
        )
    return chunks.start, len(chunks) // R
