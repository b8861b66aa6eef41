"""Reading a table of gate.toml, or the same said in Python by `tpkernels.gate.register`.

Whether it can mean anything is told by key. Nothing is imported for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from tpkernels.gate.ahead_of_time import ARCHITECTURES, Constant, undecorated
from tpkernels.gate.rules import RULES, RULES_WITH_VALUE, rule_named
from tpkernels.gate.user_kernels.record import (
    DTYPES,
    ConfigError,
    Expression,
    FunctionPath,
    OwnKernel,
    TensorType,
    Values,
)
from tpkernels.gate.user_kernels.recorded import RECORDED

SCALARS = ("i1", "i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64", "fp16", "bf16", "fp32", "fp64")
GONE = ("tile", "step", "workload")  # keys of other days
FILLS = ("normal", "uniform", "zeros", "ones")
_PLACE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")  # "module.of.it:function"
_NAME = re.compile(r"[A-Za-z0-9][\w.+=-]*(/[\w.+=-]+)*")
_registered: dict[str, OwnKernel] = {}  # in this process


def own_kernel(name: str, table: Mapping[str, Any]) -> OwnKernel:
    """What a table of gate.toml says; ConfigError for what it cannot mean."""
    if not _NAME.fullmatch(name):
        raise ConfigError("name", f"expected letters, digits and _ . + = - / only, got {name!r}")
    for key in table:
        if key in GONE:
            raise ConfigError(key, "went together with the model of cycles that needed it: remove it")
        if key not in _TYPES:
            raise ConfigError(key, f"unknown; known are {', '.join(_TYPES)}")
    for key in ("kernel", "signature"):
        if key not in table:
            raise ConfigError(key, "is missing")
    own = OwnKernel(name=name, **{key: _typed(key, value, _TYPES[key]) for key, value in table.items()})
    for check in (_check_arguments, _check_choices, _check_launch, _check_oracle):
        check(own)
    return own


def _check_arguments(own: OwnKernel) -> None:
    for name, kind in own.signature.items():
        if kind == "constexpr":
            raise ConfigError(f"signature.{name}", "is compiled in: give its value in constants")
        tensor = TensorType.of(kind)
        if not (tensor.dtype in DTYPES if tensor else kind in SCALARS):
            examples = '"*bf16", "i32", "fp32", "tensordesc<bf16[128, 64]>"'
            raise ConfigError(f"signature.{name}", f"expected a type such as {examples}, got {kind!r}")
        if name in own.constants:
            raise ConfigError(f"constants.{name}", "is in signature too")
    for key in ("aligned", "outputs", "shapes", "strides", "values", "fill"):
        among = own.tensors if key in ("outputs", "shapes", "strides", "fill") else own.signature
        for name in getattr(own, key) or ():
            if name not in among:
                what = "tensor" if among is not own.signature else "argument"
                raise ConfigError(key, f"{name!r} is no {what} of signature")
    for name in own.values:
        if name in own.tensors:
            raise ConfigError(f"values.{name}", "is a tensor, whose shape is said in shapes")


def _check_choices(own: OwnKernel) -> None:
    for one in own.architectures:
        if one not in ARCHITECTURES:
            raise ConfigError("architectures", f"expected some of {', '.join(ARCHITECTURES)}; got {one!r}")
    for one in own.rules:
        if rule_named(one) is None:
            known = (*RULES, *(f"{name}:..." for name in RULES_WITH_VALUE))
            raise ConfigError("rules", f"expected some of {', '.join(known)}; got {one!r}")
    if not own.architectures:
        raise ConfigError("architectures", "expected at least one")
    if own.num_warps not in (1, 2, 4, 8, 16, 32):
        raise ConfigError("num_warps", f"expected a power of two up to 32, got {own.num_warps}")
    if own.num_stages is not None and own.num_stages < 1:
        raise ConfigError("num_stages", f"expected 1 or more, got {own.num_stages}")
    for name, fill in own.fill.items():
        if fill not in FILLS and not (isinstance(fill, tuple) and len(fill) == 2):
            expected = f"{', '.join(FILLS)}, or [low, high] of integers below high"
            raise ConfigError(f"fill.{name}", f"expected {expected}; got {fill!r}")
    for dtype, bound in own.tolerance.items():
        if dtype not in DTYPES or not 0 < bound < 1:
            raise ConfigError(f"tolerance.{dtype}", f"expected a part of 1 for a dtype, got {bound}")


def _check_launch(own: OwnKernel) -> None:
    if not own.sizes and not own.oracle and not own.grid:
        return
    for name in own.tensors:
        if name not in own.shapes:
            raise ConfigError("shapes", f"lacks {name!r}")
    if not 1 <= len(own.grid) <= 3:
        raise ConfigError("grid", f"expected one to three numbers or expressions, got {len(own.grid)}")
    for sizes in (own.sizes, *own.computed) if own.sizes or not own.oracle else own.computed:
        for name, size in sizes.items():
            if size < 1:
                raise ConfigError("sizes", f"expected {name} of 1 or more, got {size}")
        _check_descriptors(own, own.at(sizes))


def _check_descriptors(own: OwnKernel, values: Values) -> None:
    for name, kind in own.tensors.items():
        if not kind.block:
            continue
        if len(kind.block) != len(values.shapes[name]):
            raise ConfigError(f"shapes.{name}", f"expected {len(kind.block)} sizes, as its descriptor has")
        *pitches, step = values.strides[name]
        if step != 1 or any(pitch * kind.bits % 128 for pitch in pitches):
            told = f"a descriptor wants 16-byte units beside each other, got {(*pitches, step)}"
            raise ConfigError(f"strides.{name}", told)


def _check_oracle(own: OwnKernel) -> None:
    if own.oracle is None:
        for key in ("oracle_sizes", "outputs", "fill", "tolerance"):
            if getattr(own, key):
                raise ConfigError(key, "is of use with an oracle only, and there is none")
        return
    if not own.outputs:
        raise ConfigError("outputs", "is missing: name the tensors that the kernel writes")
    for name, kind in own.tensors.items():
        fill = own.fill.get(name)
        if kind.dtype.startswith(("i", "u")) and kind.dtype != "i1":
            if name not in own.outputs and not isinstance(fill, tuple) and fill not in ("zeros", "ones"):
                say = f'say from where to where: fill = {{ {name} = [0, "columns"] }}'
                raise ConfigError(f"fill.{name}", f"it holds integers: {say}")
        elif isinstance(fill, tuple):
            raise ConfigError(f"fill.{name}", f"it holds {kind.dtype}: expected {', '.join(FILLS)}")


def _unless_absent(hint: Any) -> Any:
    return get_args(hint)[0] if NoneType in get_args(hint) else hint


_TYPES = {key: _unless_absent(hint) for key, hint in get_type_hints(OwnKernel).items() if key != "name"}
# what an error calls a type, and what stands for it in TOML
_SIMPLE: Mapping[Any, tuple[str, tuple[type, ...]]] = {
    str: ("a text", (str,)),
    int: ("an integer", (int,)),
    float: ("a float", (float, int)),
    Expression: ("an expression", (int, float, str)),
    Constant: ("a constant", (bool, *get_args(Constant))),
}
_FILL = str | tuple[Expression, ...]


def _typed(key: str, value: Any, wanted: Any) -> Any:
    """The value with lists as tuples; ConfigError if it is not of the type that is wanted."""
    if wanted == _FILL:
        wanted = str if isinstance(value, str) else tuple[Expression, ...]
    if get_origin(wanted) is Mapping:
        if not isinstance(value, Mapping):
            raise ConfigError(key, f"expected a table, got {value!r}")
        _, inner = get_args(wanted)
        return {str(name): _typed(f"{key}.{name}", one, inner) for name, one in value.items()}
    if get_origin(wanted) is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(key, f"expected a list, got {value!r}")
        return tuple(_typed(key, one, get_args(wanted)[0]) for one in value)
    if wanted is FunctionPath:
        is_place = isinstance(value, str) and _PLACE.fullmatch(value)
        if not is_place and (key, value) != ("oracle", RECORDED):
            raise ConfigError(key, f'expected "module:function", got {value!r}')
        return value
    called, types = _SIMPLE[wanted]
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise ConfigError(key, f"expected {called}, got {value!r}")
    return value


def register(
    kernel: Any,
    signature: Mapping[str, str],
    *,
    name: str | None = None,
    constants: Mapping[str, Constant] | None = None,
    aligned: Sequence[str] | None = None,
    num_warps: int | None = None,
    num_stages: int | None = None,
    options: Mapping[str, Constant] | None = None,
    architectures: Sequence[str] | None = None,
    rules: Sequence[str] | None = None,
    sizes: Mapping[str, int] | None = None,
    shapes: Mapping[str, Sequence[Expression]] | None = None,
    strides: Mapping[str, Sequence[Expression]] | None = None,
    values: Mapping[str, Expression] | None = None,
    grid: Sequence[Expression] | None = None,
    oracle: Callable[..., Any] | str | None = None,
    oracle_sizes: Sequence[Mapping[str, int]] | None = None,
    outputs: Sequence[str] | None = None,
    fill: Mapping[str, str | Sequence[Expression]] | None = None,
    tolerance: Mapping[str, float] | None = None,
) -> None:
    """Have `python -m tpkernels check --config FILE.py` check a Triton kernel that FILE imports or defines.

    Raises ValueError at once for wrong arguments. A gate.toml has the same keys.

    kernel: under `triton.jit`, perhaps also under `triton.autotune`; at the top of its module
    signature: run-time argument -> its type as Triton writes it: "*bf16", "i32", "tensordesc<bf16[128, 64]>"
    name: in findings and budgets; else that of the function
    constants: each other argument, unless it has a default
    aligned: arguments that are multiples of 16; else what is so at `sizes`, and all pointers
    options: more of Triton's
    architectures: such as ("sm_90", "gfx942"); else ("sm_90",)
    rules: such as ("no_spills", "vector_loads"); else ("no_spills",)
    sizes: of a real launch: name -> integer, which the expressions below may use, as they may constants
    shapes, strides: of each tensor, numbers or expressions: ("rows", "cdiv(columns, 2)"); else contiguous
    values: of each other argument, unless a size has its name
    grid: one to three numbers or expressions, which may use `processors`
    oracle: gets tensors in float64 and numbers by its parameters' names; returns the expected outputs;
        or "recorded": they are compared with those of the last `--update`
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
    if own.name in _registered:
        raise ValueError(f"register: {own.name!r} is registered twice: give one a `name`")
    _registered[own.name] = own


def registered() -> tuple[OwnKernel, ...]:
    """What has been registered in this process."""
    return tuple(_registered.values())


def _place(function: Callable[..., Any]) -> str:
    return f"{function.__module__}:{getattr(function, '__qualname__', type(function).__name__)}"
