"""`tpkernels.gate.register`: what a gate.toml says, said in Python beside the kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tpkernels.gate.ahead_of_time import Constant, undecorated
from tpkernels.gate.user_kernels.expressions import Expression
from tpkernels.gate.user_kernels.table import own_kernel

_tables: dict[str, dict[str, Any]] = {}


def register(
    kernel: Any,
    signature: Mapping[str, str],
    *,
    name: str | None = None,
    constants: Mapping[str, Constant] | None = None,
    aligned: Sequence[str] | None = None,
    num_warps: int | None = None,
    num_stages: int | None = None,
    architectures: Sequence[str] | None = None,
    rules: Sequence[str] | None = None,
    sizes: Mapping[str, int] | None = None,
    shapes: Mapping[str, Sequence[Expression]] | None = None,
    strides: Mapping[str, Sequence[Expression]] | None = None,
    values: Mapping[str, Expression] | None = None,
    grid: Sequence[Expression] | None = None,
    tile: Mapping[str, Expression] | None = None,
    step: Mapping[str, Expression] | None = None,
    oracle: Callable[..., Any] | str | None = None,
    oracle_sizes: Sequence[Mapping[str, int]] | None = None,
    outputs: Sequence[str] | None = None,
    fill: Mapping[str, str | Sequence[Expression]] | None = None,
    tolerance: Mapping[str, float] | None = None,
) -> None:
    """Have `python -m tpkernels check --config FILE.py` check a Triton kernel that FILE imports or defines.

    Raises ValueError at once for what cannot be meant; the same keys may stand in a gate.toml.

    kernel: under `triton.jit`, perhaps also under `triton.autotune`; at the top of its module
    signature: run-time argument -> its type as Triton writes it: "*bf16", "i32", "tensordesc<bf16[128, 64]>"
    name: in findings and budgets; else that of the function
    constants: each other argument, unless it has a default
    aligned: arguments that are multiples of 16; else what is so at `sizes`, and all pointers
    architectures: such as ("sm_90", "gfx942"); else ("sm_90",)
    rules: such as ("no_spills", "vector_loads"); else ("no_spills",)
    sizes: of a real launch: name -> integer, which the expressions below may use, as they may constants
    shapes, strides: of each tensor, numbers or expressions: ("rows", "cdiv(columns, 2)"); else contiguous
    values: of each other argument, unless a size has its name
    grid: one to three numbers or expressions, which may use `processors`
    tile, step: of a product, what a block computes of two sizes, and a turn of its loop takes of a third
    oracle: gets tensors in float64 and numbers by its parameters' names; returns the expected outputs
    oracle_sizes: at which the kernel is interpreted; else `sizes`
    outputs: the tensors that the kernel writes
    fill: tensor -> "normal", "uniform", "zeros", "ones", or (low, high) for integers
    tolerance: dtype -> norm-wise relative error; else that of our own kernels
    """
    said = dict(locals())  # parameters are the keys of a table
    function = undecorated(kernel)
    wrapped: Any = getattr(function, "fn", None)
    if not callable(wrapped):
        raise ValueError(f"register: expected a kernel under triton.jit, got {kernel!r}")
    said["kernel"] = f"{wrapped.__module__}:{wrapped.__name__}"
    said["oracle"] = _place(oracle) if callable(oracle) else oracle
    table = {key: value for key, value in said.items() if value is not None and key != "name"}
    own = own_kernel(name or wrapped.__name__, table)
    if own.name in _tables:
        raise ValueError(f"register: {own.name!r} is registered twice: give one a `name`")
    _tables[own.name] = table


def tables() -> dict[str, dict[str, Any]]:
    """What has been registered in this process, as a gate.toml would say it."""
    return dict(_tables)


def _place(function: Callable[..., Any]) -> str:
    return f"{function.__module__}:{getattr(function, '__qualname__', type(function).__name__)}"
