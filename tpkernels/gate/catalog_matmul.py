"""Catalog entries of the matmul kernels: which tiles, dtypes and epilogues are compiled for which GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch

from tpkernels.gate.entry import BF16, FP16, FP32, Constant, Entry
from tpkernels.kernels.activations import GATE_OF, Activation, Glu
from tpkernels.kernels.footprints import SHORT_NAMES, stem_of
from tpkernels.kernels.operands import Form
from tpkernels.kernels.target import A100, B200, H100, MI300, Target, fast_math
from tpkernels.kernels.tiles import KERNELS, Kernel, MatmulTile, candidates, waiting_tile


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
    precision: Literal["ieee", "tf32"] = "ieee"
    ragged: bool = False  # addresses and sizes that are multiples of nothing

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
        arguments |= {name: f"*{SHORT_NAMES[dtype]}" for name, dtype in pointers.items()}
        integers = ("T", "N", "K", *strides)
        aligned = set(arguments) | set(integers)
        if self.form == "descriptor":  # which is aligned by itself
            aligned -= {matrix.name for matrix in matrices}
        prefix = f"{self.architectures[0]}/" if self.target in (B200, MI300) else ""
        suffix = "/ragged" * self.ragged + "/tf32" * (self.precision == "tf32")
        return Entry(
            name=f"{prefix}{stem_of(self.kernel, self.form, self.dtype, tile)}/{epilogue}{suffix}",
            module=module,
            function=function,
            form=self.form,
            arguments=arguments | dict.fromkeys(integers, "i32"),
            aligned=frozenset() if self.ragged else frozenset(aligned),
            constants={
                **constants,
                "PRECISION": self.precision,
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
        name = SHORT_NAMES[dtype]
        return f"tensordesc<{name}[{block[0]}, {block[1]}]>" if self.form == "descriptor" else f"*{name}"

    @property
    def fast(self) -> bool:
        return fast_math(self.dtype, self.target)

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


def _gather_linear(case: _Case) -> Entry:
    """`linear` with waits: the same operands, and what tells of their arrival."""
    tile = waiting_tile(case.tile, chunk_rows=case.tile.group * case.tile.block_rows)
    linear = _linear(replace(case, tile=tile), "gelu_tanh", bias=True, keep_z=True)
    signals = ("flags_ptr", "awaited_ptr", "status_ptr")
    return replace(
        linear,
        name=linear.name.replace("linear/", "gather_linear/", 1),
        module="gather_linear",
        function="_gather_linear_kernel",
        arguments={
            **linear.arguments,
            **dict.fromkeys(signals, "*i32"),
            **dict.fromkeys(("first_tile", "chunk_rows", "spin_limit"), "i32"),
        },
        aligned=linear.aligned if case.ragged else linear.aligned | set(signals),
        constants={
            **linear.constants,
            "ASYNC_PROXY": case.form == "descriptor" and case.target.backend == "cuda",
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
        ("+=" if accumulate else "=") + SHORT_NAMES[dtype],
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
            yield _gather_linear(case)
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


def matmul_entries() -> Iterator[Entry]:
    """Every epilogue where the speed is, in bf16 on Hopper; elsewhere the costliest of each tile."""
    for case in _cases():
        yield from _epilogues(case, thorough=case.target == H100 and case.dtype == BF16)


# What each GPU may be given: descriptors from sm_90 on, masked pointers everywhere
NVIDIA = ("sm_80", "sm_89", "sm_90", "sm_100")


def _cases() -> Iterator[_Case]:
    for kernel in KERNELS:
        for target, architecture in ((H100, "sm_90"), (B200, "sm_100")):
            for tile in candidates(kernel, "descriptor", BF16, target):
                yield _Case(kernel, "descriptor", BF16, tile, target, (architecture,))
        largest = candidates(kernel, "descriptor", FP16, H100)[0]
        yield _Case(kernel, "descriptor", FP16, largest, H100, ("sm_90",))
        for target, architectures in ((A100, NVIDIA), (MI300, ("gfx942",))):
            for dtype, ragged in ((BF16, False), (BF16, True), (FP32, False)):
                for tile in candidates(kernel, "pointer", dtype, target, ragged):
                    yield _Case(kernel, "pointer", dtype, tile, target, architectures, ragged=ragged)
            largest = candidates(kernel, "pointer", FP16, target)[0]
            yield _Case(kernel, "pointer", FP16, largest, target, architectures)
    largest = candidates("linear", "pointer", FP32, A100)[0]
    yield _Case("linear", "pointer", FP32, largest, A100, NVIDIA, precision="tf32")
