"""Catalog entries of the kernels over the vocabulary: embedding and cross-entropy."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tpkernels.gate.ahead_of_time import ARCHITECTURES
from tpkernels.gate.entry import BF16, FP32, Entry
from tpkernels.kernels.footprints import SHORT_NAMES
from tpkernels.kernels.tiles import EMBEDDING, EMBEDDING_GRAD, LOGITS


def vocabulary_entries() -> Iterator[Entry]:
    """16-bit and fp32 logits are both usual; of the embedding's kernels the dtype changes little."""
    yield _embedding_fwd()
    yield _embedding_bwd()
    for dtype in (BF16, FP32):
        yield _softmax_statistics(dtype)
        yield _cross_entropy_grad(dtype)


def _embedding_fwd() -> Entry:
    arguments = {"ids_ptr": "*i64", "weight_ptr": "*bf16", "y_ptr": "*bf16"}
    arguments |= dict.fromkeys(("T", "V", "H", "stride_wv"), "i32")
    return Entry(
        name=f"embedding_fwd/pointer/bf16/{EMBEDDING.block_rows}x{EMBEDDING.block_cols}",
        module="embedding",
        function="_embedding_fwd_kernel",
        form="pointer",
        arguments=arguments | {"first_id": "i32"},
        aligned=frozenset(arguments),
        constants={
            "stride_wh": 1,
            "BLOCK_ROWS": EMBEDDING.block_rows,
            "BLOCK_COLS": EMBEDDING.block_cols,
        },
        num_warps=EMBEDDING.num_warps,
        num_stages=1,
        architectures=ARCHITECTURES,
    )


def _embedding_bwd() -> Entry:
    arguments = {"dy_ptr": "*bf16", "tokens_ptr": "*i64", "starts_ptr": "*i64", "dweight_ptr": "*bf16"}
    arguments |= dict.fromkeys(("H", "stride_dt"), "i32")
    return Entry(
        name=f"embedding_bwd/pointer/bf16/{EMBEDDING_GRAD.block_rows}x{EMBEDDING_GRAD.block_cols}",
        module="embedding",
        function="_embedding_bwd_kernel",
        form="pointer",
        arguments=arguments,
        aligned=frozenset(arguments),
        constants={
            "stride_dh": 1,
            "BLOCK_ROWS": EMBEDDING_GRAD.block_rows,
            "BLOCK_COLS": EMBEDDING_GRAD.block_cols,
        },
        num_warps=EMBEDDING_GRAD.num_warps,
        num_stages=1,
        architectures=ARCHITECTURES,
    )


def _softmax_statistics(dtype: torch.dtype) -> Entry:
    name = SHORT_NAMES[dtype]
    arguments = {"logits_ptr": f"*{name}", "target_ptr": "*i64", "statistics_ptr": "*fp32"}
    arguments |= dict.fromkeys(("T", "stride_xt"), "i32")
    return Entry(
        name=f"softmax_statistics/pointer/{name}/{LOGITS.block_cols}",
        module="cross_entropy",
        function="_softmax_statistics_kernel",
        form="pointer",
        arguments=arguments | dict.fromkeys(("columns", "first_id"), "i32"),
        aligned=frozenset(arguments),
        constants={"stride_xv": 1, "BLOCK_COLS": LOGITS.block_cols},
        num_warps=LOGITS.num_warps,
        num_stages=1,
        architectures=ARCHITECTURES,
    )


def _cross_entropy_grad(dtype: torch.dtype) -> Entry:
    name = SHORT_NAMES[dtype]
    arguments = {"logits_ptr": f"*{name}", "target_ptr": "*i64"}
    arguments |= dict.fromkeys(("maximum_ptr", "total_ptr", "dloss_ptr"), "*fp32")
    arguments |= {"dlogits_ptr": f"*{name}"} | dict.fromkeys(("V", "stride_xt", "stride_dt"), "i32")
    numbers = dict.fromkeys(("columns", "first_id"), "i32") | dict.fromkeys(
        ("on_target", "off_target"), "fp32"
    )
    return Entry(
        name=f"cross_entropy_grad/pointer/{name}/{LOGITS.block_cols}",
        module="cross_entropy",
        function="_cross_entropy_grad_kernel",
        form="pointer",
        arguments=arguments | numbers,
        aligned=frozenset(arguments),
        constants={"stride_xv": 1, "stride_dv": 1, "BLOCK_COLS": LOGITS.block_cols},
        num_warps=LOGITS.num_warps,
        num_stages=1,
        architectures=ARCHITECTURES,
    )
