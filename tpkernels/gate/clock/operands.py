"""Operands of an instruction as names of registers, and the closures that compute from these.

Nothing is parsed when code is executed: a closure holds the names, and what is done to each operand.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from tpkernels.gate.clock.cubin import Instruction
from tpkernels.gate.clock.effects import Effect
from tpkernels.gate.clock.values import WORD, Value, WarpState

Execute = Callable[[WarpState], Effect | None]
Registers = dict[str, Value]
Change = Callable[[Value], Value]
Result = TypeVar("Result")

NOWHERE = "_"  # what RZ, URZ, PT and UPT become as destinations
_REGISTER = re.compile(r"^(U?R|U?P)(\d+|Z|T)(?:\.(?:64|U32))?$")
_PREDICATE = re.compile(r"^!?U?P[T\d]$")
_CONSTANT = re.compile(r"^c\[0x([0-9a-f]+)\]\[0x([0-9a-f]+)\]$")
_TERM = re.compile(r"^(U?R(?:\d+|Z))(?:\.(64|U32|X4|X8|X16))?$")


class UnknownOperand(ValueError):
    """An operand of a form that is not known here."""


@dataclass(frozen=True, slots=True)
class Meaning:
    """What an instruction does to the values of its warp."""

    run: Execute | None
    writes: tuple[str, ...] = ()  # registers that `run` gives values
    reads: tuple[str, ...] = ()  # registers that it needs
    forgets: tuple[str, ...] = ()  # registers whose new values are unknown
    acts: bool = False  # beyond the warp's values: its effect, a jump


@dataclass(frozen=True, slots=True)
class SourceOperand:
    """A register that an instruction reads, and how its value is changed on the way."""

    name: str
    change: Change | None = None

    def of(self, registers: Registers) -> Any:
        """Its value."""
        value = registers[self.name]
        return value if value is None or self.change is None else self.change(value)


def is_predicate(text: str) -> bool:
    return bool(_PREDICATE.match(text))


def source(text: str) -> SourceOperand:
    """An operand that is read: "-R4", "~UR5", "|R6|", "!P0", "0x10", "c[0x0][0x210]"."""
    if text.startswith("|") and text.endswith("|"):
        return SourceOperand(source(text[1:-1]).name, _absolute)
    if text[0] in "-~!" and not text.startswith("-0x"):
        return SourceOperand(source(text[1:]).name, {"-": _negated, "~": _inverted, "!": _not}[text[0]])
    if re.match(r"^-?0x[0-9a-f]+$", text):
        return SourceOperand(f"#{int(text, 16) & WORD}")
    if constant := _CONSTANT.match(text):
        return SourceOperand(f"c[{int(constant[1], 16):#x}][{int(constant[2], 16):#x}]")
    if register := _REGISTER.match(text):
        return SourceOperand(register[1] + register[2])
    if text == "SRZ":
        return SourceOperand("SRZ")
    raise UnknownOperand(text)


def destination(text: str) -> str:
    register = _REGISTER.match(text)
    if not register:
        raise UnknownOperand(text)
    return NOWHERE if register[2] in "ZT" else register[1] + register[2]


def following(name: str, count: int = 2) -> tuple[str, ...]:
    """The `count` registers that begin with `name`: "R4", "R5"; of a zero or nowhere the same again."""
    if name in ("RZ", "URZ", "SRZ", NOWHERE):
        return (name,) * count
    if name.startswith("c["):
        bank, offset = (int(part, 16) for part in re.findall(r"0x[0-9a-f]+", name))
        return tuple(f"c[{bank:#x}][{offset + 4 * number:#x}]" for number in range(count))
    if name.startswith("#"):
        return (name, *["#0"] * (count - 1))
    kind, number = re.fullmatch(r"(U?R)(\d+)", name).groups()  # type: ignore[union-attr]
    return tuple(f"{kind}{int(number) + more}" for more in range(count))


def pair(text: str) -> tuple[str, str]:
    """The low and the high word of a 64-bit operand, an immediate with its sign."""
    if text.startswith("-0x"):
        return source(text).name, f"#{WORD}"
    low, high = following(source(text).name)
    return low, high


def results(one: Instruction) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """Return the destination, the predicates written with it, and the operands that are read."""
    operands = one.operands[1:]
    count = 0
    while count < len(operands) and is_predicate(operands[count]) and operands[count][0] != "!":
        count += 1
    carries = tuple(destination(text) for text in operands[:count])
    if all(name == NOWHERE for name in carries):
        carries = ()
    return destination(one.operands[0]), carries, operands[count:]


def assign(to: str, sources: tuple[SourceOperand, ...], compute: Callable[..., Value]) -> Meaning:
    """`to` becomes compute(*sources), or unknown where a source is."""
    names, compute = tuple(one.name for one in sources), _changed(compute, sources)

    def run(state: WarpState) -> None:
        registers = state.registers
        values = [registers[name] for name in names]
        for value in values:
            if value is None:
                registers[to] = None
                return
        registers[to] = compute(*values)

    return Meaning(run, (to,), names)


def assign_all(
    to: tuple[str, ...], sources: tuple[SourceOperand, ...], compute: Callable[..., tuple[Value, ...]]
) -> Meaning:
    """As `assign`, for several results."""
    names, compute = tuple(one.name for one in sources), _changed(compute, sources)

    def run(state: WarpState) -> None:
        registers = state.registers
        values = [registers[name] for name in names]
        if any(value is None for value in values):
            registers.update(dict.fromkeys(to))
        else:
            registers.update(zip(to, compute(*values), strict=True))

    return Meaning(run, to, names)


def copy(to: tuple[str, ...], names: tuple[str, ...]) -> Meaning:
    def run(state: WarpState) -> None:
        registers = state.registers
        registers.update(zip(to, [registers[name] for name in names], strict=True))

    return Meaning(run, to, names)


@dataclass(frozen=True, slots=True)
class Address:
    """A memory operand: the bytes it points at, None where a register is unknown."""

    reads: tuple[str, ...]
    of: Callable[[Registers], Value]


def address(text: str) -> Address:
    """ "[R4+UR23+0x34430]", "desc[UR4][R2.64+0x10]", "[UR9+-0x20]"."""
    found = re.search(r"\[([^\[\]]*)\]$", text)
    if not found:
        raise UnknownOperand(text)
    offset = 0
    terms: list[tuple[str, str | None, int]] = []  # low word, high word, times
    for part in filter(None, found[1].replace("-0x", "+-0x").split("+")):
        if part.startswith(("0x", "-0x")):
            offset += int(part, 16)
        elif term := _TERM.match(part):
            if term[1] in ("RZ", "URZ"):
                continue
            scale = int(term[2][1:]) if term[2] and term[2][0] == "X" else 1
            terms.append((term[1], following(term[1])[1] if term[2] == "64" else None, scale))
        else:
            raise UnknownOperand(text)
    reads = tuple(name for low, high, _ in terms for name in ((low, high) if high else (low,)))
    return Address(reads, _sum(terms, offset))


def _sum(terms: list[tuple[str, str | None, int]], offset: int) -> Callable[[Registers], Value]:
    narrow = len(terms) == 1 and terms[0][1:] == (None, 1)  # wraps in 32 bits

    def total(registers: Registers) -> Value:
        found: Any = offset
        for low, high, scale in terms:
            value, more = registers[low], 0 if high is None else registers[high]
            if value is None or more is None:
                return None
            found = found + value * scale + (more << 32)
        result: Value = found & WORD if narrow else found
        return result

    return total


def _changed(compute: Callable[..., Result], sources: tuple[SourceOperand, ...]) -> Callable[..., Result]:
    changes = tuple(one.change for one in sources)
    if not any(changes):
        return compute

    def changed(*values: Value) -> Result:
        return compute(
            *(
                value if change is None else change(value)
                for value, change in zip(values, changes, strict=True)
            )
        )

    return changed


def _negated(value: Value) -> Value:
    assert value is not None
    return 0x1_0000_0000 - value  # past 32 bits for 0: subtracting nothing carries, as in hardware


def _inverted(value: Value) -> Value:
    assert value is not None
    return value ^ WORD


def _not(value: Value) -> Value:
    assert value is not None
    return value ^ True


def _absolute(value: Any) -> Value:
    found: Value = abs((value ^ 0x80000000) - 0x80000000)
    return found
