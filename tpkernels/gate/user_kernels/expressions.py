"""Sizes as a gate.toml writes them: numbers, or sums and products of names, such as "cdiv(M, BLOCK_M)"."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping

Numeric = int | float
Expression = int | float | str

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
    """ValueError says what is wrong with it.

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
    """ValueError for fractions, too, and for what is less than `least`."""
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
