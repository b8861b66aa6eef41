"""One compilation of one kernel, as plain data: what Triton would otherwise derive at launch."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tpkernels.kernels.operands import Form

if TYPE_CHECKING:
    from triton.compiler import ASTSource

Constant = int | bool | str
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True, slots=True)
class Entry:
    """A kernel with the type of each argument, and the GPUs it is shipped for."""

    name: str  # "linear/descriptor/bf16/128x256x64/gelu_tanh+bias+z"
    module: str  # of tpkernels.kernels
    function: str
    form: Form
    arguments: Mapping[str, str]  # run-time argument -> Triton's name of its type
    aligned: frozenset[str]  # arguments that are multiples of 16: without them the compiler cannot pipeline
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
