"""A kernel as its owners describe it. Nothing of theirs is imported here.

Sizes are numbers, or sums and products of names, such as "cdiv(M, BLOCK_M)".
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NewType

from tpkernels.gate.ahead_of_time import Constant
from tpkernels.gate.occupancy import H100_SMS
from tpkernels.gate.rules import DEFAULT_RULES

Numeric = int | float
Expression = int | float | str
# Triton's names of types -> torch's
DTYPES: Mapping[str, str] = {
    **{"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"},
    **{"fp8e4nv": "float8_e4m3fn", "fp8e5": "float8_e5m2"},
    **{"i64": "int64", "i32": "int32", "i16": "int16", "i8": "int8", "u8": "uint8", "i1": "bool"},
}
FunctionPath = NewType("FunctionPath", str)  # "module:function"
_DESCRIPTOR = re.compile(r"tensordesc<(\w+)\[(\d+(?:, ?\d+)*)\](?:,(.*))?>")


class ConfigError(ValueError):
    """What is wrong in a gate.toml, or in what it names: the key, then the reason."""

    def __init__(self, key: str, reason: object) -> None:
        super().__init__(f"{key}: {reason}")


@dataclass(frozen=True, slots=True)
class TensorType:
    """The type of a tensor argument."""

    dtype: str  # Triton's name of it
    block: tuple[int, ...] = ()  # what a descriptor moves; (): a pointer

    @property
    def bits(self) -> int:
        """The bits of an element, as its dtype's name says."""
        return int(re.findall(r"\d+", self.dtype)[0])

    @staticmethod
    def of(kind: str) -> TensorType | None:
        """Read Triton's name of a type; None if it is a number's."""
        if kind.startswith("*"):
            return TensorType(kind.removeprefix("*").removeprefix("k"))
        if found := _DESCRIPTOR.fullmatch(kind):
            return TensorType(found[1], tuple(map(int, found[2].split(","))))
        return None


@dataclass(frozen=True, slots=True)
class Values:
    """What a launch passes, at some sizes."""

    grid: tuple[int, ...]
    shapes: Mapping[str, tuple[int, ...]]  # of each tensor
    strides: Mapping[str, tuple[int, ...]]
    numbers: Mapping[str, Numeric]  # of each other argument
    names: Mapping[str, Numeric]  # sizes, constants and numbers: what expressions may use


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnKernel:
    """The keys of a table in gate.toml and their types; `docs/guard-your-kernels.md` explains each."""

    name: str  # the table's: in findings and budgets
    kernel: FunctionPath
    signature: Mapping[str, str]  # run-time argument -> Triton's name of its type
    constants: Mapping[str, Constant] = field(default_factory=dict)
    aligned: tuple[str, ...] | None = None  # arguments that are multiples of 16; None: as `sizes` make them
    num_warps: int = 4
    num_stages: int | None = None
    options: Mapping[str, Constant] = field(default_factory=dict)  # more options of Triton
    architectures: tuple[str, ...] = ("sm_90",)
    rules: tuple[str, ...] = DEFAULT_RULES
    sizes: Mapping[str, int] = field(default_factory=dict)  # of a real launch: what is aligned there
    shapes: Mapping[str, tuple[Expression, ...]] = field(default_factory=dict)
    strides: Mapping[str, tuple[Expression, ...]] = field(default_factory=dict)  # absent: contiguous
    values: Mapping[str, Expression] = field(default_factory=dict)  # absent: the size of the same name
    grid: tuple[Expression, ...] = ()
    oracle: FunctionPath | None = None
    oracle_sizes: tuple[Mapping[str, int], ...] = ()  # to compute at; (): `sizes`
    outputs: tuple[str, ...] = ()
    fill: Mapping[str, str | tuple[Expression, ...]] = field(default_factory=dict)
    tolerance: Mapping[str, float] = field(default_factory=dict)  # dtype -> relative error

    @property
    def tensors(self) -> dict[str, TensorType]:
        found = {name: TensorType.of(kind) for name, kind in self.signature.items()}
        return {name: kind for name, kind in found.items() if kind}

    @property
    def computed(self) -> tuple[Mapping[str, int], ...]:
        """The sizes to compute at."""
        return (self.oracle_sizes or (self.sizes,)) if self.oracle else ()

    def as_table(self) -> dict[str, Any]:
        """What gate.toml says, as `own_kernel` takes it."""
        return {key: value for key, value in asdict(self).items() if key != "name" and value is not None}

    @property
    def _constants(self) -> dict[str, Numeric]:
        return {
            name: value
            for name, value in self.constants.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }

    def at(self, sizes: Mapping[str, int], processors: int = H100_SMS) -> Values:
        """What is launched; ConfigError names the key whose expression has no value."""
        names = {**self._constants, **sizes, "processors": processors}
        numbers = {}
        for name, kind in self.signature.items():
            if name not in self.tensors:
                given = self.values.get(name, name)
                number = _told(f"values.{name}", value_of, given, names)
                numbers[name] = _of_type(f"values.{name}", number, kind)
        names |= numbers
        shapes = {name: self._each("shapes", name, names, 1) for name in self.tensors}
        strides = {
            name: self._each("strides", name, names, 0) if name in self.strides else contiguous(shape)
            for name, shape in shapes.items()
        }
        for name, steps in strides.items():
            if len(steps) != len(shapes[name]):
                raise ConfigError(f"strides.{name}", f"expected {len(shapes[name])}, got {len(steps)}")
        grid = tuple(_told("grid", whole_number, one, names, 1) for one in self.grid)
        return Values(grid, shapes, strides, numbers, names)

    def _each(self, key: str, name: str, names: Mapping[str, Numeric], least: int) -> tuple[int, ...]:
        expressions = getattr(self, key)[name]
        return tuple(_told(f"{key}.{name}", whole_number, one, names, least) for one in expressions)


def _told(key: str, function: Any, *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except ValueError as error:
        raise ConfigError(key, error) from error


def _of_type(key: str, number: Numeric, kind: str) -> Numeric:
    if kind.startswith(("fp", "bf")):
        return float(number)
    bits, signed = int(kind[1:]), kind[0] == "i" and kind != "i1"
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1)) if signed else (0, 2**bits)
    if type(number) is not int or not low <= number < high:
        raise ConfigError(key, f"expected an {kind}, got {number}")
    return number


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return tuple(strides)[: len(shape)]


_OPERATORS: Mapping[type[ast.operator], Callable[[Numeric, Numeric], Numeric]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
    ast.Div: lambda a, b: a / b,
}
_FUNCTIONS: Mapping[str, Callable[..., Numeric]] = {"cdiv": lambda a, b: -(-a // b), "min": min, "max": max}


def value_of(expression: Expression, names: Mapping[str, Numeric]) -> Numeric:
    """Evaluate an expression; ValueError says what is wrong with it.

    >>> value_of("cdiv(M, 128) * 2", {"M": 300})
    6
    """
    if not isinstance(expression, str):
        return expression
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body, names)
    except SyntaxError as error:
        raise ValueError(f"{expression!r} is no expression") from error
    except (ZeroDivisionError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{expression!r} has no value: {error}") from error


def whole_number(expression: Expression, names: Mapping[str, Numeric], least: int = 0) -> int:
    """Evaluate an expression that must be an integer of `least` or more; else ValueError."""
    value = value_of(expression, names)
    if type(value) is not int or value < least:
        raise ValueError(f"expected an integer of {least} or more, {expression!r} is {value}")
    return value


def _value(node: ast.expr, names: Mapping[str, Numeric]) -> Numeric:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return value
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.Name(id=name):
            raise ValueError(f"{name!r} is none of the names {', '.join(names) or '(there are none)'}")
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _OPERATORS:
            return _OPERATORS[type(operator)](_value(left, names), _value(right, names))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, names)
        case ast.Call(func=ast.Name(id=function), args=arguments, keywords=[]) if function in _FUNCTIONS:
            return _FUNCTIONS[function](*(_value(argument, names) for argument in arguments))
    raise ValueError(f"{ast.unparse(node)!r}: expected + - * / // %, {', '.join(_FUNCTIONS)} of names")
