"""What a product is asked to compute, without the numbers: all that a choice by timing may depend on.

T tokens, N out_features, K in_features are those of the layer, in each of its products:

    kernel          product    depth
    linear, glu     T x N      K
    dgrad, dglu     T x K      N
    wgrad           N x K      T
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tpkernels.kernels.operands import MatrixLayout
from tpkernels.kernels.target import fp32_precision

if TYPE_CHECKING:
    from tpkernels.kernels.tiles import Kernel


@dataclass(frozen=True, slots=True)
class Problem:
    """A step on operands of these sizes, layouts and options."""

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

    @staticmethod
    def of(
        step: str,
        kernel: Kernel,
        matrices: Sequence[Tensor],
        options: tuple[str, ...],
        *,
        written: Sequence[Tensor] | None,
        pairs: int = 1,
        dtype: torch.dtype | None = None,
    ) -> Problem:
        """matrices: that are read, those that are multiplied first

        dtype: of the result, if it is another
        written: results as well as operands; None: one that is allocated
        pairs: of matrices whose products are summed, which is one product of as much more depth
        """
        first, second = matrices[0], matrices[1]
        weights = matrices[1 : 2 * pairs : 2]
        out_features = first.shape[1] if kernel == "wgrad" else sum(weight.shape[0] for weight in weights)
        result_dtype = dtype or first.dtype
        tf32 = multiplied_in_tf32(first.dtype)
        layouts = tuple(MatrixLayout.of("", matrix) for matrix in matrices)
        results = tuple(MatrixLayout.of("", matrix) for matrix in written or ())
        # one stands for all of them, as it does where they are allocated: the one that is hardest to write
        layouts += tuple(sorted(results, key=lambda layout: layout.tma_obstacle() is None)[:1])
        problem = Problem(
            step,
            kernel,
            first.dtype,
            result_dtype,
            tf32,
            first.shape[0],
            out_features,
            second.shape[1],
            options,
            layouts,
        )
        if written is None:
            rows, cols = problem.product
            result = MatrixLayout("", rows, cols, cols, 1, result_dtype.itemsize, address=0)
            problem = replace(problem, layouts=(*layouts, result))
        return replace(problem, tokens=token_class(first.shape[0]))

    @property
    def product(self) -> tuple[int, int]:
        """(rows, cols) of what the kernel computes."""
        match self.kernel:
            case "linear" | "glu":
                return self.tokens, self.out_features
            case "dgrad" | "dglu":
                return self.tokens, self.in_features
            case "wgrad":
                return self.out_features, self.in_features

    @property
    def depth(self) -> int:
        """The length of the reduction."""
        match self.kernel:
            case "linear" | "glu":
                return self.in_features
            case "dgrad" | "dglu":
                return self.out_features
            case "wgrad":
                return self.tokens

    @property
    def empty(self) -> bool:
        return 0 in (self.tokens, self.out_features, self.in_features)

    @property
    def key(self) -> str:
        """One line that names this problem in files and logs."""
        words = (
            self.step,
            dtype_class(self.dtype, self.tf32),
            f"{self.tokens}x{self.out_features}x{self.in_features}",
            "+".join(self.options),
            ",".join(map(layout_class, self.layouts)),
        )
        return " ".join(word for word in words if word)


def multiplied_in_tf32(dtype: torch.dtype) -> bool:
    return dtype == torch.float32 and fp32_precision() == "tf32"


def dtype_class(dtype: torch.dtype, tf32: bool) -> str:
    """A dtype that is multiplied, as keys name it."""
    return str(dtype).removeprefix("torch.") + "/tf32" * tf32


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
    turned = MatrixLayout(
        layout.name,
        layout.cols,
        layout.rows,
        layout.col_stride,
        layout.row_stride,
        layout.itemsize,
        layout.address,
    )
    return "ragged-columns" if turned.tma_obstacle() else "columns"
