"""What a step is asked to compute, without the numbers: all that a choice may depend on.

T tokens, N out_features, K in_features are those of the layer, in each of its steps:

    step                 arguments                                product    options
    linear               x, weight, bias, activation, keep_z      T x N      activation, bias, z
    glu                  x, w_gate, w_up, kind, keep_gu           T x N      kind, gu
    dgrad                dy, weight                               T x K
    dgrad_act            dy, weight, z, activation, bias_grad     T x K      activation, db
    dglu                 dy, weight, g, u, kind                   T x K      kind
    wgrad                dy, x                                    N x K
    wgrad_accumulate_    main_grad, dy, x                         N x K      the dtype of main_grad
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from tpkernels.kernels.operands import Layout
from tpkernels.kernels.tiles import Kernel

Step = Literal["linear", "glu", "dgrad", "dgrad_act", "dglu", "wgrad", "wgrad_accumulate_"]
STEPS: tuple[Step, ...] = get_args(Step)
KERNEL_OF: Mapping[Step, Kernel] = {
    "linear": "linear",
    "glu": "glu",
    "dgrad": "dgrad",
    "dgrad_act": "dgrad",
    "dglu": "dglu",
    "wgrad": "wgrad",
    "wgrad_accumulate_": "wgrad",
}


@dataclass(frozen=True, slots=True)
class Problem:
    """A step on operands of these sizes, layouts and options."""

    step: Step
    dtype: torch.dtype  # of what is multiplied
    tf32: bool  # whether fp32 may be multiplied so
    tokens: int  # their class, see `token_class`
    out_features: int
    in_features: int
    options: tuple[str, ...]
    layouts: tuple[Layout, ...]  # of every matrix read or written

    @property
    def kernel(self) -> Kernel:
        return KERNEL_OF[self.step]

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
            str(self.dtype).removeprefix("torch.") + "/tf32" * self.tf32,
            f"{self.tokens}x{self.out_features}x{self.in_features}",
            "+".join(self.options),
            ",".join(map(layout_class, self.layouts)),
        )
        return " ".join(word for word in words if word)


def token_class(tokens: int) -> int:
    """`tokens` rounded up to three significant bits: four classes from one power of two to the next.

    Batches of varying length would otherwise be timed over and over.

    >>> [token_class(tokens) for tokens in (1, 7, 9, 4096, 4097, 6000)]
    [1, 7, 10, 4096, 5120, 6144]
    """
    unit = 1 << max(0, tokens.bit_length() - 3)
    return -(-tokens // unit) * unit


def layout_class(layout: Layout) -> str:
    """What matters of a layout for speed: which way it is contiguous, and whether on 16-byte boundaries."""
    if not layout.tma_obstacle():
        return "rows"
    if layout.col_stride == 1:
        return "ragged"
    if layout.row_stride != 1:
        return "strided"
    turned = Layout(
        layout.name,
        layout.cols,
        layout.rows,
        layout.col_stride,
        layout.row_stride,
        layout.itemsize,
        layout.address,
    )
    return "ragged-columns" if turned.tma_obstacle() else "columns"


def problem_of(step: Step, arguments: tuple[Any, ...]) -> Problem:
    """The problem that a call of `steps.Steps` poses; its tensors may be on the meta device."""
    options: tuple[str, ...] = ()
    matrices: tuple[Tensor, ...]
    result: tuple[int, int] | None
    match step:
        case "linear":
            x, weight, bias, activation, keep_z = arguments
            (T, K), N = x.shape, weight.shape[0]
            matrices, result = (x, weight), (T, N)
            options = (activation, *("bias",) * (bias is not None), *("z",) * keep_z)
        case "glu":
            x, w_gate, w_up, kind, keep_gu = arguments
            (T, K), N = x.shape, w_gate.shape[0]
            matrices, result = (x, w_gate, w_up), (T, N)
            options = (kind, *("gu",) * keep_gu)
        case "dgrad":
            dy, weight = arguments
            (T, N), K = dy.shape, weight.shape[1]
            matrices, result = (dy, weight), (T, K)
        case "dgrad_act":
            dy, weight, z, activation, bias_grad = arguments
            (T, N), K = dy.shape, weight.shape[1]
            matrices, result = (dy, weight, z), (T, K)
            options = (activation, *("db",) * bias_grad)
        case "dglu":
            dy, weight, g, u, kind = arguments
            (T, N), K = dy.shape, weight.shape[1]
            matrices, result = (dy, weight, g, u), (T, K)
            options = (kind,)
        case "wgrad":
            dy, x = arguments
            (T, N), K = dy.shape, x.shape[1]
            matrices, result = (dy, x), (N, K)
        case "wgrad_accumulate_":
            main_grad, dy, x = arguments
            (T, N), K = dy.shape, x.shape[1]
            matrices, result = (dy, x, main_grad), None
            options = (str(main_grad.dtype).removeprefix("torch."),)
    dtype = matrices[0].dtype
    tf32 = dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    layouts = [Layout.of("", matrix) for matrix in matrices]
    if result is not None:
        layouts.append(_allocated(result, dtype))
    return Problem(step, dtype, tf32, token_class(T), N, K, options, tuple(layouts))


def _allocated(shape: tuple[int, int], dtype: torch.dtype) -> Layout:
    """The layout of a result that is yet to be allocated."""
    rows, cols = shape
    return Layout("", rows, cols, cols, 1, dtype.itemsize, address=0)
