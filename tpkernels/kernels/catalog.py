"""Every kernel form that is shipped, as plain data: what to compile, for which GPUs, without having one.

An entry holds what Triton would derive at launch: the type of each run-time argument, which of them are
multiples of 16 (addresses and sizes; without this the compiler silently drops pipelining), and the
constants. `ast_source` turns one into what `triton.compile` takes. The tests hold the names to the kernels'.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tpkernels.kernels.activations import GATE_OF, Activation, Glu
from tpkernels.kernels.operands import Form
from tpkernels.kernels.target import A100, H100, Target
from tpkernels.kernels.tiles import Kernel, MatmulTile, candidates

if TYPE_CHECKING:
    from triton.compiler import ASTSource

Constant = int | bool | str | float
TRITON_NAME: Mapping[torch.dtype, str] = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
}
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True, slots=True)
class Entry:
    """One compilation of one kernel."""

    name: str  # "linear/descriptor/bf16/128x256x64/gelu_tanh+bias+z"
    module: str  # of tpkernels.kernels
    function: str
    form: Form
    arguments: Mapping[str, str]  # run-time argument -> Triton's name of its type
    aligned: frozenset[str]  # those that are multiples of 16
    constants: Mapping[str, Constant]
    num_warps: int
    num_stages: int
    architectures: tuple[str, ...]  # "sm_90", "gfx942"


def ast_source(entry: Entry) -> ASTSource:
    """What `triton.compile(..., target=..., options={"num_warps": ..., "num_stages": ...})` takes."""
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(f"tpkernels.kernels.{entry.module}"), entry.function)
    names = list(kernel.arg_names)
    return ASTSource(
        fn=kernel,
        signature={name: entry.arguments.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in entry.constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in entry.aligned},
    )


@dataclass(frozen=True, slots=True)
class _Matrix:
    """An operand of a kernel, and the block of it that one descriptor load or store moves."""

    name: str
    block: tuple[int, int]
    dtype: torch.dtype | None = None  # that of the multiplied operands unless given


@dataclass(frozen=True, slots=True)
class _Case:
    """A kernel with one tile for one kind of GPU; the epilogues multiply it."""

    kernel: Kernel
    form: Form
    dtype: torch.dtype
    tile: MatmulTile
    target: Target
    architectures: tuple[str, ...]

    def entry(
        self,
        epilogue: str,
        module: str,
        function: str,
        matrices: tuple[_Matrix, ...],
        pointers: Mapping[str, torch.dtype],
        strides: tuple[str, ...],
        constants: Mapping[str, Constant],
    ) -> Entry:
        """strides: the names of outer strides; inner ones are 1, which a launch makes a constant."""
        tile = self.tile
        arguments = {
            matrix.name: self._matrix_type(matrix.dtype or self.dtype, matrix.block) for matrix in matrices
        }
        arguments |= {name: f"*{TRITON_NAME[dtype]}" for name, dtype in pointers.items()}
        integers = ("T", "N", "K", *strides)
        aligned = set(pointers) | set(integers)
        if self.form == "pointer":
            aligned |= {matrix.name for matrix in matrices}
        size = f"{tile.block_rows}x{tile.block_cols}x{tile.block_depth}"
        backend = "" if self.target.backend == "cuda" else f"{self.target.backend}/"
        return Entry(
            name=f"{backend}{self.kernel}/{self.form}/{TRITON_NAME[self.dtype]}/{size}/{epilogue}",
            module=module,
            function=function,
            form=self.form,
            arguments=arguments | dict.fromkeys(integers, "i32"),
            aligned=frozenset(aligned),
            constants={
                **constants,
                "PRECISION": "ieee",
                "BLOCK_ROWS": tile.block_rows,
                "BLOCK_COLS": tile.block_cols,
                "BLOCK_DEPTH": tile.block_depth,
                "PARTS": tile.parts,
                "GROUP": tile.group,
                "FLATTEN": tile.flatten,
                "TMA": self.form == "descriptor",
            },
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            architectures=self.architectures,
        )

    def _matrix_type(self, dtype: torch.dtype, block: tuple[int, int]) -> str:
        name = TRITON_NAME[dtype]
        return f"tensordesc<{name}[{block[0]}, {block[1]}]>" if self.form == "descriptor" else f"*{name}"

    @property
    def fast(self) -> bool:
        return self.dtype.itemsize == 2 and self.target.backend == "cuda"

    @property
    def part(self) -> tuple[int, int]:
        return self.tile.block_rows, self.tile.block_cols // self.tile.parts


def _linear(case: _Case, activation: Activation, bias: bool, keep_z: bool) -> Entry:
    tile = case.tile
    return case.entry(
        activation + "+bias" * bias + "+z" * keep_z,
        "linear",
        "_linear_fwd_kernel",
        (
            _Matrix("x", (tile.block_rows, tile.block_depth)),
            _Matrix("w", (tile.block_cols, tile.block_depth)),
            _Matrix("z", case.part),
            _Matrix("y", case.part),
        ),
        {"b_ptr": case.dtype},
        ("stride_xt", "stride_wn"),
        {
            "ACTIVATION": activation,
            "HAS_BIAS": bias,
            "KEEP_Z": keep_z,
            "FAST": case.fast,
            **dict.fromkeys(("stride_xk", "stride_wk", "stride_bn"), 1),
        },
    )


def _glu(case: _Case, kind: Glu, keep: bool) -> Entry:
    tile = case.tile
    weight_block = (tile.block_cols, tile.block_depth)
    return case.entry(
        kind + "+gu" * keep,
        "glu",
        "_glu_fwd_kernel",
        (
            _Matrix("x", (tile.block_rows, tile.block_depth)),
            _Matrix("w_gate", weight_block),
            _Matrix("w_up", weight_block),
            *(_Matrix(name, case.part) for name in ("g", "u", "h")),
        ),
        {},
        ("stride_xt", "stride_gn", "stride_un"),
        {
            "GATE": GATE_OF[kind],
            "KEEP": keep,
            "FAST": case.fast,
            **dict.fromkeys(("stride_xk", "stride_gk", "stride_uk"), 1),
        },
    )


def _dgrad(case: _Case, activation: Activation, bias_grad: bool) -> Entry:
    tile = case.tile
    return case.entry(
        activation + "+db" * bias_grad,
        "dgrad",
        "_dgrad_kernel",
        (
            _Matrix("dy", (tile.block_rows, tile.block_depth)),
            _Matrix("w", (tile.block_depth, tile.block_cols)),
            _Matrix("z", case.part),
            _Matrix("dx", case.part),
        ),
        {"partials_ptr": FP32},
        ("stride_dyt", "stride_wn", "stride_zt"),
        {
            "ACTIVATION": activation,
            "BIAS_GRAD": bias_grad,
            "FAST": case.fast,
            **dict.fromkeys(("stride_dyn", "stride_wk", "stride_zk"), 1),
        },
    )


def _dglu(case: _Case, kind: Glu, emit_h: bool) -> Entry:
    tile = case.tile
    return case.entry(
        kind + "+h" * emit_h,
        "dglu",
        "_dglu_kernel",
        (
            _Matrix("dy", (tile.block_rows, tile.block_depth)),
            _Matrix("w", (tile.block_depth, tile.block_cols)),
            *(_Matrix(name, case.part) for name in ("g", "u", "dg", "du", "h")),
        ),
        {},
        ("stride_dyt", "stride_wn", "stride_gt", "stride_ut"),
        {
            "GATE": GATE_OF[kind],
            "EMIT_H": emit_h,
            "FAST": case.fast,
            **dict.fromkeys(("stride_dyn", "stride_wk", "stride_gk", "stride_uk"), 1),
        },
    )


def _wgrad(case: _Case, dtype: torch.dtype, accumulate: bool) -> Entry:
    tile = case.tile
    return case.entry(
        ("+=" if accumulate else "=") + TRITON_NAME[dtype],
        "wgrad",
        "_wgrad_kernel",
        (
            _Matrix("dy", (tile.block_depth, tile.block_rows)),
            _Matrix("x", (tile.block_depth, tile.block_cols)),
            _Matrix("dw", case.part, dtype),
        ),
        {},
        ("stride_dyt", "stride_xt", "stride_dwn"),
        {
            "ACCUMULATE": accumulate,
            "REDUCE": accumulate and case.form == "descriptor" and dtype == FP32,
            **dict.fromkeys(("stride_dyn", "stride_xk", "stride_dwk"), 1),
        },
    )


def _epilogues(case: _Case, thorough: bool) -> Iterator[Entry]:
    """What is launched with a tile: the costliest epilogue, and if `thorough` the others too."""
    match case.kernel:
        case "linear":
            yield _linear(case, "gelu_tanh", bias=True, keep_z=True)
            if thorough:
                yield _linear(case, "none", bias=False, keep_z=False)
                yield _linear(case, "gelu", bias=True, keep_z=True)
                yield _linear(case, "silu", bias=True, keep_z=True)
                yield _linear(case, "relu2", bias=True, keep_z=True)
        case "glu":
            yield _glu(case, "swiglu", keep=True)
            if thorough:
                yield _glu(case, "swiglu", keep=False)
                yield _glu(case, "geglu", keep=True)
                yield _glu(case, "geglu_tanh", keep=True)
        case "dgrad":
            yield _dgrad(case, "gelu_tanh", bias_grad=True)
            if thorough:
                yield _dgrad(case, "none", bias_grad=False)
                yield _dgrad(case, "gelu_tanh", bias_grad=False)
                yield _dgrad(case, "gelu", bias_grad=True)
                yield _dgrad(case, "silu", bias_grad=True)
                yield _dgrad(case, "relu2", bias_grad=True)
        case "dglu":
            yield _dglu(case, "swiglu", emit_h=True)
            if thorough:
                yield _dglu(case, "geglu", emit_h=True)
                yield _dglu(case, "geglu_tanh", emit_h=True)
        case "wgrad":
            yield _wgrad(case, FP32, accumulate=True)
            if thorough:
                yield _wgrad(case, case.dtype, accumulate=False)
                yield _wgrad(case, FP32, accumulate=False)
                yield _wgrad(case, case.dtype, accumulate=True)


def _matmuls() -> Iterator[Entry]:
    for kernel in ("linear", "glu", "dgrad", "dglu", "wgrad"):
        for tile in candidates(kernel, "descriptor", BF16, H100):
            case = _Case(kernel, "descriptor", BF16, tile, H100, ("sm_90", "sm_100"))
            yield from _epilogues(case, thorough=True)
        for tile in candidates(kernel, "pointer", BF16, A100):
            case = _Case(kernel, "pointer", BF16, tile, A100, ("sm_80", "sm_89", "sm_90"))
            yield from _epilogues(case, thorough=False)


def catalog() -> tuple[Entry, ...]:
    """All entries, in a fixed order; names are unique."""
    return tuple(_matmuls())
