"""From fp8 to wider numbers, `y = data * scale`: kernel and launcher. Oracle: `scaled.dequantize_ref`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpkernels.kernels import launch
from tpkernels.kernels.interpret import mend
from tpkernels.kernels.launch_plans import planned
from tpkernels.kernels.operands import DTYPES, FP8
from tpkernels.kernels.recipe import BLOCK
from tpkernels.kernels.target import require_fp8, target_of

mend()


@triton.jit
def _dequantize_kernel(
    data_ptr,  # (T, K)
    scale_ptr,  # (T, S)
    y_ptr,  # (T, K) contiguous
    T,
    K,
    stride_dt,
    stride_dk,
    stride_st,
    stride_ss,  # 0: all of a row share one
    BLOCK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """One program takes BLOCK_ROWS rows of GROUPS times BLOCK columns."""
    scales = tl.cdiv(K, BLOCK)
    col_tiles = tl.cdiv(scales, GROUPS)
    # int64: T * K passes 2**31 at 512k tokens of width 4096
    t = (tl.program_id(0) // col_tiles).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    s = tl.program_id(0) % col_tiles * GROUPS + tl.arange(0, GROUPS)
    k = (s[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]).to(tl.int64)[None, :, :]
    rows = t[:, None, None]
    mask = (rows < T) & (k < K)
    data = tl.load(data_ptr + rows * stride_dt + k * stride_dk, mask, 0.0).to(tl.float32)
    in_scales = (t < T)[:, None] & (s < scales)[None, :]
    scale = tl.load(scale_ptr + t[:, None] * stride_st + s.to(tl.int64)[None, :] * stride_ss, in_scales, 0.0)
    tl.store(y_ptr + rows * K + k, (data * scale[:, :, None]).to(y_ptr.dtype.element_ty), mask)


BLOCK_ROWS, GROUPS, NUM_WARPS = 8, 8, 8


@planned
def dequantize(data: Tensor, scale: Tensor, *, dtype: str, out: Tensor | None = None) -> Tensor:
    """data * scale, computed in fp32 and rounded to dtype: "bfloat16", "float16" or "float32".

    data: (rows, columns) of fp8, of any strides
    scale: (rows, 1) or (rows, columns / 128, rounded up), in fp32
    out: where it is written; rows of a larger matrix, say
    """
    wanted = getattr(torch, dtype)
    if wanted not in DTYPES:
        raise TypeError(f"dequantize: expected bfloat16, float16 or float32 as dtype, got {dtype}")
    if data.dtype not in FP8 or scale.dtype != torch.float32:
        raise TypeError(
            f"dequantize: expected data in fp8 and scale in fp32, got {data.dtype} and {scale.dtype}"
        )
    if data.ndim != 2:
        raise ValueError(f"dequantize: expected data of 2 dimensions, got shape {tuple(data.shape)}")
    T, K = data.shape
    shapes = (T, 1), (T, launch.ceil_div(K, BLOCK))
    if tuple(scale.shape) not in shapes or scale.device != data.device:
        raise ValueError(
            f"dequantize: expected scale of shape {shapes[0]} or {shapes[1]} on {data.device} for data "
            f"{tuple(data.shape)}, got {tuple(scale.shape)} on {scale.device}"
        )
    require_fp8("dequantize", target_of(data.device))
    (y,) = launch.results("dequantize", out, {"y": (T, K)}, (("data", data), ("scale", scale)), dtype=wanted)
    if y.numel():
        programs = launch.ceil_div(T, BLOCK_ROWS) * launch.ceil_div(K, GROUPS * BLOCK)
        launch.on(data.device, _dequantize_kernel, (programs,))(
            data,
            scale,
            y,
            T,
            K,
            *data.stride(),
            scale.stride(0),
            scale.stride(1) if scale.shape[1] > 1 else 0,
            BLOCK=BLOCK,
            BLOCK_ROWS=BLOCK_ROWS,
            GROUPS=GROUPS,
            num_warps=NUM_WARPS,
        )
    return y
