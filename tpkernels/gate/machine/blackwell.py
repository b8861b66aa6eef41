"""What stands in for the instructions of `gl.nvidia.blackwell`: tensor memory, its products, and commits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from triton.experimental.gluon import language as gl

from tpkernels.gate.machine.events import Commit, TensorMultiply
from tpkernels.gate.machine.faults import Misuse
from tpkernels.gate.machine.memory import View
from tpkernels.gate.machine.recorder import current

COLUMNS = 512  # of tensor memory: a word in each of 128 lanes


@dataclass(frozen=True)
class TensorMemoryLayout:
    """As Triton 3.9 has it: before, its fields had other names."""

    block: Sequence[int]
    col_stride: int
    cga_layout: Sequence[Sequence[int]]
    two_ctas: bool


def allocate_tensor_memory(element_ty: Any, shape: Sequence[int], layout: TensorMemoryLayout) -> View:
    if layout.two_ctas != (current().blocks == 2):
        raise NotImplementedError("the machine knows pairs that multiply together, and single blocks")
    columns = shape[-1] * shape[0] if len(shape) == 3 else shape[-1]
    if columns > COLUMNS:
        raise Misuse(f"{columns} columns of tensor memory, of {COLUMNS}")
    return current().allocate(element_ty, shape, layout)


def get_reg_layout(view: View) -> Any:
    """The machine asks layouts only which block has which rows."""
    halves = [[1, 0]] if current().blocks == 2 else []
    return gl.NVMMADistributedLayout([3, 0], [current().num_warps, 1], [16, view.shape[1], 16], halves)


View.get_reg_layout = get_reg_layout  # type: ignore[attr-defined]


def tcgen05_mma(
    a: View, b: View, acc: View, *, use_acc: bool = True, mbarriers: Sequence[View] | None = None
) -> None:
    """Blocks have halves of the rows of a, and of the columns of b; the first starts the product of both."""
    blocks = range(current().blocks)
    (rows, depth), (other_depth, cols) = a.shape, b.shape
    if depth != other_depth or acc.shape != [rows, cols * len(blocks)] or a.dtype != b.dtype:
        raise Misuse(f"tcgen05_mma of {a.shape} {a.dtype}, {b.shape} {b.dtype} into {acc.shape}")
    if mbarriers is None:
        raise NotImplementedError("the machine knows asynchronous products, that a commit tells of")
    if current().block:
        return
    left, right, sums = ([view.in_block(block) for block in blocks] for view in (a, b, acc))
    operands: list[list[torch.Tensor]] = []

    def read() -> None:
        operands[:] = [[view.get().float() for view in views] for views in (left, right)]

    def finish() -> None:
        whole = torch.cat(operands[1], 1)
        for view, half in zip(sums, operands[0], strict=True):
            view.put(half @ whole + (view.get() if use_acc else 0))

    current().emit(TensorMultiply, (*left, *right), tuple(sums), bool(use_acc), read, finish)
    for barrier in mbarriers:
        tcgen05_commit(barrier)


def tcgen05_commit(barrier: View) -> None:
    if current().for_both(barrier):
        raise Misuse(f"a commit arrives in each block, and {barrier.name} lies in the first")
    if current().block == 0:
        for block in range(current().blocks):
            current().emit(Commit, current().barrier(barrier.in_block(block)))


FUNCTIONS: dict[str, Callable[..., Any]] = {
    one.__name__: one for one in (TensorMemoryLayout, allocate_tensor_memory, tcgen05_mma, tcgen05_commit)
}
