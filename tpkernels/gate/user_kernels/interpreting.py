"""What Triton's interpreter lacks for kernels of others: libdevice, methods of numbers, bf16 from fp64.

Upstream a function of libdevice returns None there, a float stays Python's, which has no `to`, and a cast
from fp64 or fp16 to bf16 makes integers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language.extra import cuda, libdevice
from triton.runtime import interpreter

_UNARY: Mapping[str, Callable[..., Any]] = {
    **{name: getattr(np, name) for name in ("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt")},
    **{name: getattr(np, name) for name in ("sin", "cos", "tan", "tanh", "sinh", "cosh", "ceil", "floor")},
    **{name: getattr(np, name) for name in ("trunc", "rint", "abs")},
    **{"asin": np.arcsin, "acos": np.arccos, "atan": np.arctan, "asinh": np.arcsinh, "acosh": np.arccosh},
    **{"atanh": np.arctanh, "nearbyint": np.rint, "cbrt": np.cbrt},
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "erf": lambda x: torch.erf(torch.from_numpy(np.ascontiguousarray(x))).numpy(),
    **{
        "fast_expf": np.exp,
        "fast_logf": np.log,
        "fast_tanhf": np.tanh,
        "fast_sinf": np.sin,
        "fast_cosf": np.cos,
    },
}
_BINARY: Mapping[str, Callable[..., Any]] = {
    **{"pow": np.power, "fast_powf": np.power, "fmod": np.fmod, "atan2": np.arctan2, "hypot": np.hypot},
    **{"div_rn": np.divide, "fast_dividef": np.divide, "mul_rn": np.multiply, "copysign": np.copysign},
}


@cache
def mend() -> None:
    """Add these, in a process that interprets, before modules of kernels are imported."""
    for name, function in {**_UNARY, **_BINARY}.items():
        for module in (libdevice, cuda.libdevice):
            setattr(module, name, _Function(function))
    builder, upstream, upstream_cast = (
        interpreter.InterpreterBuilder,
        interpreter._implicit_cvt,
        interpreter.InterpreterBuilder.cast_impl,
    )

    def converted(argument: Any) -> Any:
        if not isinstance(argument, float):
            return upstream(argument)
        handle = interpreter.TensorHandle(np.array([argument], np.float32), tl.float32)
        return tl.tensor(handle, tl.float32)

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        others = source.data.dtype.kind == "f" and source.data.dtype != np.float32
        if target.scalar == tl.bfloat16 and others:
            source = interpreter.TensorHandle(source.data.astype(np.float32), tl.float32)
        return upstream_cast(self, source, target)

    interpreter._implicit_cvt, builder.cast_impl = converted, cast_impl


class _Function:
    """A function of tensors by one of arrays."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *given: Any, **_: Any) -> Any:
        first = next(one for one in given if isinstance(one, tl.tensor))
        operands = [one.handle.data if isinstance(one, tl.tensor) else one for one in given]
        with np.errstate(all="ignore"):
            values = np.asarray(self._function(*operands)).astype(first.handle.data.dtype)
        return tl.tensor(interpreter.TensorHandle(values, first.dtype.scalar), first.type)
