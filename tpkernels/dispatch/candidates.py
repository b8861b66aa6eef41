"""What a choice by timing depends on (`TuneKey`), and the candidates for it: torch, its operators, our tiles.

T tokens, N out_features, K in_features are those of the layer, in each of its products:

    kernel          product    depth
    linear, glu     T x N      K
    dgrad, dglu     T x K      N
    wgrad           N x K      T
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tpkernels.dispatch.record import Candidate, Primitive
from tpkernels.kernels.matmul_tile import MatmulTile
from tpkernels.kernels.operands import DTYPES, FP8, Form, MatrixLayout, are_halves, choose_form
from tpkernels.kernels.target import (
    A100,
    B200,
    H100,
    L40S,
    MI300,
    Target,
    fp8_obstacle,
    fp32_precision,
)
from tpkernels.kernels.tiles import candidates as shipped_tiles
from tpkernels.kernels.tiles import serves

if TYPE_CHECKING:
    from tpkernels.kernels.tiles import Kernel

# how a key names arguments that are there, or asked for
OPTIONS = {"bias": "bias", "keep_z": "z", "keep_gu": "gu", "bias_grad": "db", "fast_accumulate": "fast"}
SCALES = frozenset(("x_scale", "w_scale"))  # arguments that any layout of is read as fast
FEW_TURNS = 2  # of all SMs: with more, sums of parts cost more than a last turn that is not full
LEAST_STEPS = 8  # of each part of a depth, so that filling and emptying the pipeline stays cheap
BLOCK_BYTES = 1024  # of shared memory that CUDA takes for each block
BUSY_TURNS = 4  # of all SMs: a smaller tile could save a part of the last of them, and loses more


# by the names of `planning.gpus`: values, so that choices can be made without such a GPU
TARGET_GPUS: Mapping[str, Target] = {
    "a100": A100,
    "l40s": L40S,
    "h100": H100,
    "h200": H100,
    "b200": B200,
    "mi300x": MI300,
}


@dataclass(frozen=True, slots=True)
class TuneKey:
    """A primitive on operands of these sizes, layouts and options, without their numbers."""

    step: str  # the name of the primitive
    kernel: Kernel
    dtype: torch.dtype  # of what is multiplied
    result: torch.dtype
    tf32: bool  # whether fp32 may be multiplied so
    tokens: int  # their class, see `token_class`
    out_features: int
    in_features: int
    options: tuple[str, ...]
    layouts: tuple[MatrixLayout, ...]  # of every matrix read or written

    @property
    def product(self) -> tuple[int, int]:
        """(rows, cols) of what the kernel computes."""
        rows = self.out_features if self.kernel == "wgrad" else self.tokens
        return rows, self.out_features if self.kernel in ("linear", "glu") else self.in_features

    @property
    def depth(self) -> int:
        """The length of the reduction."""
        if self.kernel == "wgrad":
            return self.tokens
        return self.in_features if self.kernel in ("linear", "glu") else self.out_features

    @property
    def empty(self) -> bool:
        return 0 in (self.tokens, self.out_features, self.in_features)

    def __str__(self) -> str:
        """Return the line that names this key in files and logs."""
        words = (
            self.step,
            dtype_class(self.dtype, self.tf32),
            f"{self.tokens}x{self.out_features}x{self.in_features}",
            "+".join(self.options),
            ",".join(map(layout_class, self.layouts)),
        )
        return " ".join(word for word in words if word)


def tune_key(record: Primitive[..., Any], *args: Any, out: Sequence[Tensor] = ()) -> TuneKey:
    """Return the key of a call, whose tensors may be on the meta device. out: what it writes into"""
    assert record.kernel is not None, "only what has tiles is timed"
    call = signature(record.by_torch).bind(*args).arguments
    matrices = [
        value
        for name, value in call.items()
        if isinstance(value, Tensor) and value.ndim == 2 and name not in SCALES
    ]
    options = [value for value in call.values() if isinstance(value, str)]
    given = [name for name, value in call.items() if not (value is None or value is False)]
    options += [OPTIONS[name] for name in given if name in OPTIONS]
    if record.kernel == "glu" and are_halves(*matrices[1:3]):
        options.append("halves")  # of one matrix, by which one product multiplies
    if call.keys() >= SCALES:
        options += _options_of_scales(matrices[0], matrices[1], call["x_scale"], call["w_scale"])
    if record.changes_first:
        matrices = [*matrices[1:], matrices[0]]
        options.append(_word(matrices[-1].dtype))
    first, second = matrices[:2]
    result = getattr(torch, call["dtype"]) if "dtype" in call else first.dtype
    # products that are summed are one product of as much more depth
    weights = [value for name, value in call.items() if name.startswith("weight")] or [second]
    out_features = first.shape[1] if record.kernel == "wgrad" else sum(each.shape[0] for each in weights)
    tokens, in_features = first.shape[0], second.shape[1]
    written = [MatrixLayout.of("", tensor) for tensor in out if tensor.ndim == 2]
    key = TuneKey(
        record.name,
        record.kernel,
        first.dtype,
        result,
        multiplied_in_tf32(first.dtype),
        tokens,
        out_features,
        in_features,
        tuple(options),
        tuple(MatrixLayout.of("", matrix) for matrix in matrices),
    )
    if not written and not record.changes_first:
        rows, cols = key.product
        written = [MatrixLayout("", rows, cols, cols, 1, result.itemsize, address=0)]
    # one result stands for all of them, as it does where they are allocated: the one that is hardest to write
    hardest = sorted(written, key=lambda layout: layout.tma_obstacle() is None)[:1]
    return replace(key, tokens=token_class(tokens), layouts=(*key.layouts, *hardest))


def _options_of_scales(x: Tensor, weight: Tensor, x_scale: Tensor, w_scale: Tensor) -> list[str]:
    """Return the words by which keys tell products in fp8 apart."""
    words = [] if weight.dtype == x.dtype else [_word(weight.dtype)]
    words += ["blocks"] * (x_scale.shape[1] != 1)
    return words + ["square"] * (w_scale.shape[0] != weight.shape[0])


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def multiplied_in_tf32(dtype: torch.dtype) -> bool:
    return dtype == torch.float32 and fp32_precision() == "tf32"


def dtype_class(dtype: torch.dtype, tf32: bool) -> str:
    """A dtype that is multiplied, as keys name it."""
    return _word(dtype) + "/tf32" * tf32


def token_class(tokens: int) -> int:
    """`tokens` rounded up to three significant bits: four classes from one power of two to the next.

    Batches of varying length would otherwise be timed over and over.

    >>> [token_class(tokens) for tokens in (1, 7, 9, 4096, 4097, 6000)]
    [1, 7, 10, 4096, 5120, 6144]
    """
    unit = 1 << max(0, tokens.bit_length() - 3)
    return -(-tokens // unit) * unit


def layout_class(layout: MatrixLayout) -> str:
    """What matters of a layout for speed: which way it is contiguous, and whether on 16-byte boundaries."""
    if not layout.tma_obstacle():
        return "rows"
    if layout.col_stride == 1:
        return "ragged"
    if layout.row_stride != 1:
        return "strided"
    turned = replace(
        layout,
        rows=layout.cols,
        cols=layout.rows,
        row_stride=layout.col_stride,
        col_stride=layout.row_stride,
    )
    return "ragged-columns" if turned.tma_obstacle() else "columns"


def candidates(record: Primitive[..., Any], key: TuneKey, target: Target) -> tuple[Candidate, ...]:
    """List what may be worth timing, plain torch first. Names are unique and do not change between runs."""
    if key.empty:  # nothing to win
        return (record.torch,)
    others = [way for way in record.library if way.name != "torch" and way.fits(key, target)]
    return record.torch, *(way.candidate for way in others), *_ours(record, key, target)


def forms_of(key: TuneKey, target: Target) -> tuple[Form, ...]:
    """Return the forms in which our kernels can compute a key; none if they cannot."""
    dtypes = DTYPES if key.step != "scaled_linear" else FP8
    if key.empty or key.dtype not in dtypes or find_spec("triton") is None:
        return ()
    if key.dtype in FP8 and (fp8_obstacle(target) or key.result not in DTYPES):
        return ()
    if choose_form(target, key.dtype, key.layouts) == "descriptor":
        return "descriptor", "pointer"
    return ("pointer",)  # serves everything, and is lighter to launch


def shared_memory(key: TuneKey, form: Form, tile: MatmulTile) -> int:
    """Bytes that a block takes, but for some for barriers and alignment.

    Operands in flight, and of a descriptor kernel one part of a result on its way to or from memory; a
    flattened loop that also reads in its epilogue keeps apart what it reads and what it writes.
    """
    cols = tile.block_cols * (2 if key.kernel == "glu" else 1)
    operands = tile.num_stages * (tile.block_rows + cols) * tile.block_depth * key.dtype.itemsize
    if form == "pointer":
        return operands
    in_fp32 = tile.splits > 1 or key.options == ("float32",)  # slots, or a main_grad
    adds = key.step == "wgrad_accumulate_" and not in_fp32  # else the copy engine does
    parts = 2 if tile.flatten and (adds or key.step in ("dgrad_act", "dglu")) else 1
    itemsize = 4 if in_fp32 else key.result.itemsize
    return operands + parts * tile.block_rows * (tile.block_cols // tile.parts) * itemsize


def _ours(record: Primitive[..., Any], key: TuneKey, target: Target) -> Iterator[Candidate]:
    ragged = any(layout.tma_obstacle() for layout in key.layouts)
    held = target.shared_memory + BLOCK_BYTES
    for form in forms_of(key, target):
        tiles = [
            tile
            for tile in shipped_tiles(key.kernel, form, key.dtype, target, ragged)
            if tile.per_processor * (shared_memory(key, form, tile) + BLOCK_BYTES) <= held
            and serves(key.kernel, tile, key.options)
        ]
        for tile in tiles:
            if not _is_useless(tile, tiles, key, target.processors):
                yield record.ours(f"triton/{form}/{tile.name}", tile, form)


def _is_useless(tile: MatmulTile, tiles: Sequence[MatmulTile], key: TuneKey, processors: int) -> bool:
    """Whether another tile is sure to be as fast on so many SMs.

    Oversized: half of this tile's rows would cover the result, and a lower tile is there to do so.
    Undersized: a tile of four times the area keeps every SM busy for BUSY_TURNS already.
    Needlessly split: cutting the depth saves no turn of the SMs, or makes parts of few steps.
    """
    rows, cols = key.product
    if rows * 2 <= tile.block_rows and any(other.block_rows < tile.block_rows for other in tiles):
        return True
    if any(
        other.block_rows * other.block_cols >= 4 * tile.block_rows * tile.block_cols
        and other.tiles(rows, cols) >= BUSY_TURNS * processors
        for other in tiles
    ):
        return True
    programs, count = processors * tile.per_processor, tile.tiles(rows, cols)

    def turns(splits: int) -> float:
        return -(-count * splits // programs) / splits

    return tile.splits > 1 and (
        count >= FEW_TURNS * programs
        or key.depth < LEAST_STEPS * tile.splits * tile.block_depth
        or any(
            other.splits < tile.splits and turns(other.splits) <= turns(tile.splits)
            for other in tiles
            if replace(tile, splits=other.splits) == other
        )
    )
