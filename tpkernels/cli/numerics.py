"""The numerical half of `check`, a program of its own: every launcher in Triton's interpreter against float64.

Prints one JSON line a case: its name, its largest error as a fraction of what is allowed, and what is wrong.
Run with TRITON_INTERPRET=1. Sizes straddle the edges of the interpreter's tile; inputs lie in NaN and outputs
in canaries, so that a read or write outside shows.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tpkernels.kernels import launch, reference
from tpkernels.kernels.activations import ACTIVATIONS, GATE_OF
from tpkernels.kernels.bias_grad import bias_grad
from tpkernels.kernels.dglu import dglu
from tpkernels.kernels.dgrad import dgrad, dgrad_act
from tpkernels.kernels.glu import glu_fwd
from tpkernels.kernels.linear import linear_fwd
from tpkernels.kernels.norm import layer_norm_fwd, rms_norm_fwd
from tpkernels.kernels.norm_backward import layer_norm_bwd, rms_norm_bwd
from tpkernels.kernels.operands import Form
from tpkernels.kernels.wgrad import wgrad, wgrad_accumulate_

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# norm-wise against float64: about one and a half correct roundings of the result
BOUND: Mapping[torch.dtype, float] = {FP32: 3e-7, FP16: 3e-4, BF16: 2.5e-3}
WAYS: tuple[tuple[Form, torch.dtype], ...] = (("descriptor", BF16), ("pointer", BF16), ("pointer", FP32))
# tokens, in_features, out_features: descriptors want rows of whole 16-byte units, pointers take anything
SIZES: Mapping[Form, tuple[int, int, int]] = {"descriptor": (72, 88, 104), "pointer": (71, 45, 83)}
MARGIN = 64  # elements around what is framed; keeps the 16-byte alignment that descriptors need
CANARY = 7.0

Results = Mapping[str, tuple[Tensor | None, Tensor]]  # what -> (computed, exact)


@dataclass(frozen=True)
class Case:
    name: str
    run: Callable[[], Results]


class Outputs:
    """Allocates in place of `launch.empty`: NaN inside canaries."""

    def __init__(self) -> None:
        self.buffers: list[tuple[Tensor, int]] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        count = torch.Size(shape).numel()
        buffer = torch.full((count + 2 * MARGIN,), CANARY, dtype=dtype, device=device)
        self.buffers.append((buffer, count))
        return buffer[MARGIN : MARGIN + count].fill_(float("nan")).view(shape)

    def overrun(self) -> bool:
        """Whether some kernel wrote outside its output, since this was asked last."""
        outside = [torch.cat([buffer[:MARGIN], buffer[MARGIN + count :]]) for buffer, count in self.buffers]
        self.buffers.clear()
        return any(bool((margin != CANARY).any()) for margin in outside)


def random(rows: int, cols: int, dtype: torch.dtype) -> Tensor:
    """A (rows, cols) view of a wider matrix; all around it is NaN."""
    pitch = -(-cols // 8) * 8 + 8
    wide = torch.full((rows + 2, pitch), float("nan"), dtype=dtype)
    wide[1 : rows + 1, :cols] = torch.randn(rows, cols)
    return wide[1 : rows + 1, :cols]


def cases() -> Iterator[Case]:
    for form, dtype in WAYS:
        way = f"{form}/{str(dtype).removeprefix('torch.')}"
        for activation in ACTIVATIONS:
            yield Case(f"linear_fwd/{activation}/{way}", lambda f=form, d=dtype, a=activation: _linear(f, d, a))
            yield Case(f"dgrad_act/{activation}/{way}", lambda f=form, d=dtype, a=activation: _dgrad_act(f, d, a))
        for kind in GATE_OF:
            yield Case(f"glu_fwd/{kind}/{way}", lambda f=form, d=dtype, k=kind: _glu(f, d, k))
            yield Case(f"dglu/{kind}/{way}", lambda f=form, d=dtype, k=kind: _dglu(f, d, k))
        yield Case(f"dgrad/{way}", lambda f=form, d=dtype: _dgrad(f, d))
        yield Case(f"wgrad/{way}", lambda f=form, d=dtype: _wgrad(f, d))
        for into in (FP32, BF16):
            name = f"wgrad_accumulate_/{str(into).removeprefix('torch.')}/{way}"
            yield Case(name, lambda f=form, d=dtype, i=into: _wgrad_accumulate(f, d, i))
