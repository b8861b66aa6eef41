"""Catalog entries of the kernels that multiply no matrices: norms and sums."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tpkernels.gate.ahead_of_time import ARCHITECTURES
from tpkernels.gate.entry import BF16, FP32, Entry
from tpkernels.kernels.footprints import SHORT_NAMES
from tpkernels.kernels.tiles import MAX_FEATURES, SLOT_SUM, SUM, row_tile

FEATURES = (1024, 8192, MAX_FEATURES)


def row_entries() -> Iterator[Entry]:
    """Norms with every option on, at three widths; the sums of each dtype that they meet."""
    for centre in (False, True):
        for features in FEATURES:
            yield _norm_fwd(features, centre)
            yield _norm_bwd(features, centre)
    yield _sum_rows(BF16)
    yield _sum_rows(FP32)
    for wait in (False, True):
        yield _reduce_slots(BF16, wait)
        yield _reduce_slots(FP32, wait)


def _norm_fwd(features: int, centre: bool) -> Entry:
    tile = row_tile("catalog", features)
    matrices = ("x_ptr", "residual_ptr", "weight_ptr", "bias_ptr", "y_ptr", "summed_ptr")
    arguments = dict.fromkeys(matrices, "*bf16") | dict.fromkeys(("mean_ptr", "rstd_ptr"), "*fp32")
    arguments |= dict.fromkeys(("T", "K", "stride_xt", "stride_rt"), "i32")
    return Entry(
        name=f"norm_fwd/pointer/bf16/{features}/{'layer' if centre else 'rms'}+residual",
        module="norm",
        function="_norm_fwd_kernel",
        form="pointer",
        arguments=arguments | {"eps": "fp32"},
        aligned=frozenset(arguments),
        constants={
            **dict.fromkeys(("stride_xk", "stride_rk", "stride_wk", "stride_bk"), 1),
            "CENTRE": centre,
            "HAS_RESIDUAL": True,
            "HAS_BIAS": centre,
            "BLOCK_ROWS": tile.block_rows,
            "BLOCK_COLS": tile.block_cols,
        },
        num_warps=tile.num_warps,
        num_stages=1,
        architectures=ARCHITECTURES,
    )


def _norm_bwd(features: int, centre: bool) -> Entry:
    tile = row_tile("catalog", features)
    arguments = dict.fromkeys(("dy_ptr", "s_ptr", "dsummed_ptr", "weight_ptr", "ds_ptr"), "*bf16")
    arguments |= dict.fromkeys(("mean_ptr", "rstd_ptr", "dweight_ptr"), "*fp32")
    arguments |= dict.fromkeys(("T", "K", "stride_dyt", "stride_st", "stride_dt"), "i32")
    return Entry(
        name=f"norm_bwd/pointer/bf16/{features}/{'layer' if centre else 'rms'}+dsummed",
        module="norm",
        function="_norm_bwd_kernel",
        form="pointer",
        arguments=arguments,
        aligned=frozenset(arguments),
        constants={
            **dict.fromkeys(("stride_dyk", "stride_sk", "stride_dk", "stride_wk"), 1),
            "CENTRE": centre,
            "HAS_DSUMMED": True,
            "CHUNK": tile.chunk,
            "BLOCK_ROWS": tile.block_rows,
            "BLOCK_COLS": tile.block_cols,
        },
        num_warps=tile.num_warps,
        num_stages=1,
        architectures=ARCHITECTURES,
    )


def _sum_rows(dtype: torch.dtype) -> Entry:
    arguments = {"source_ptr": f"*{SHORT_NAMES[dtype]}", "sums_ptr": "*fp32"}
    arguments |= dict.fromkeys(("rows", "cols", "stride_row"), "i32")
    return Entry(
        name=f"sum_rows/pointer/{SHORT_NAMES[dtype]}/{SUM.chunk}x{SUM.block_cols}",
        module="bias_grad",
        function="_sum_rows_kernel",
        form="pointer",
        arguments=arguments,
        aligned=frozenset(arguments),
        constants={
            "stride_col": 1,
            "CHUNK": SUM.chunk,
            "BLOCK_ROWS": SUM.block_rows,
            "BLOCK_COLS": SUM.block_cols,
        },
        num_warps=SUM.num_warps,
        num_stages=1,
        architectures=ARCHITECTURES,
    )


def _reduce_slots(dtype: torch.dtype, wait: bool) -> Entry:
    name = SHORT_NAMES[dtype]
    arguments = {"slots_ptr": f"*{name}", "b_ptr": f"*{name}", "y_ptr": f"*{name}"}
    arguments |= dict.fromkeys(("flags_ptr", "awaited_ptr", "status_ptr"), "*i32" if wait else f"*{name}")
    arguments |= dict.fromkeys(("T", "N", "stride_sr", "stride_st"), "i32")
    return Entry(
        name=f"reduce_slots/pointer/{name}/{SLOT_SUM.block_rows}x{SLOT_SUM.block_cols}/bias{'+wait' * wait}",
        module="reduce",
        function="_reduce_slots_kernel",
        form="pointer",
        arguments=arguments | dict.fromkeys(("R", "first_chunk", "splits", "spin_limit"), "i32"),
        aligned=frozenset(arguments),
        constants={
            **dict.fromkeys(("stride_sn", "stride_bn"), 1),
            "HAS_BIAS": True,
            "WAIT": wait,
            "BLOCK_ROWS": SLOT_SUM.block_rows,
            "BLOCK_COLS": SLOT_SUM.block_cols,
        },
        num_warps=SLOT_SUM.num_warps,
        num_stages=1,
        architectures=ARCHITECTURES,
    )
