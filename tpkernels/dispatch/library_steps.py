"""Steps by torch's fused operators, where one computes just what is asked in fewer passes.

`offers` says which of them do; the chooser times them beside plain torch and our kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tpkernels.dispatch.problem import Problem
from tpkernels.kernels.activations import Activation
from tpkernels.kernels.target import Target


def addmm_activation(
    x: Tensor, weight: Tensor, bias: Tensor, activation: Activation, keep_z: bool
) -> tuple[Tensor, None]:
    """`linear` with the activation in cuBLASLt's epilogue."""
    return torch._addmm_activation(bias, x, weight.T, use_gelu=activation == "gelu_tanh"), None


def addmm_(main_grad: Tensor, dy: Tensor, x: Tensor) -> None:
    """`wgrad_accumulate_` of one dtype in one product."""
    main_grad.addmm_(dy.T, x)


def addmm_dtype_out(main_grad: Tensor, dy: Tensor, x: Tensor) -> None:
    """`wgrad_accumulate_` of 16-bit operands into fp32 in one product."""
    torch.ops.aten.addmm.dtype_out(main_grad, dy.T, x, main_grad.dtype, out=main_grad)


def offers(problem: Problem, target: Target) -> tuple[str, ...]:
    """The names of the functions above that fit, empty for most problems."""
    match problem.step, problem.options:
        case "linear", ("relu", "bias"):
            fitting = "addmm_activation" if hasattr(torch, "_addmm_activation") else None
        case "linear", ("gelu_tanh", "bias") if target.backend == "cuda":  # elsewhere it is the erf form
            fitting = "addmm_activation" if hasattr(torch, "_addmm_activation") else None
        case "wgrad_accumulate_", (main_grad,) if main_grad == str(problem.dtype).removeprefix("torch."):
            fitting = "addmm_"
        case "wgrad_accumulate_", ("float32",) if target.backend == "cuda" and problem.dtype.itemsize == 2:
            fitting = "addmm_dtype_out" if hasattr(torch.ops.aten.addmm, "dtype_out") else None
        case _:
            fitting = None
    return () if fitting is None else (fitting,)
