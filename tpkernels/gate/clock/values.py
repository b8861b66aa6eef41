"""What a warp knows while its code is executed: registers, predicates, where it is.

A value that is the same in all lanes is a plain int (a predicate: bool), one that differs is an array of 32
lanes, and what comes from global memory or is floating point is None: unknown. Registers hold 32 bits as
0 to 2**32 - 1. Immediates and constants stand among the registers, as "#64" and "c[0x0][0x210]".
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tpkernels.gate.clock.cubin import Cubin
from tpkernels.gate.occupancy import WARP

Lanes = NDArray[np.int64] | NDArray[np.bool_]
Value = int | Lanes | None
Mask = NDArray[np.bool_]
Argument = int | float | None  # None: unknown, as the content of a descriptor is

ADDRESSES = 2**40  # from one tensor's address to the next one's
WORD = 0xFFFFFFFF
LANES = np.arange(WARP, dtype=np.int64)
ALL_LANES = np.ones(WARP, dtype=np.bool_)

# Where bank 0 of sm_90 has what a launch brings beside its parameters (read off cubins: blockIdx code, CS2R).
_THREADS_AT, _GRID_AT, _STACK_AT, _BANK_ADDRESS_AT = 0x0, 0xC, 0x28, 0x198
_STACK = 0x00FFFC00
BANK_ADDRESS = 0x7000_0000_0000  # where generic addresses of parameters begin
_IMMEDIATE = re.compile(r"(?<![\w\]])-?0x[0-9a-f]+")
_CONSTANT = re.compile(r"c\[0x([0-9a-f]+)\]\[0x([0-9a-f]+)\]")


@dataclass(frozen=True, slots=True)
class Constants:
    """The constant banks of a launch; words that are not in `known` of bank 0 are unknown."""

    banks: Mapping[int, bytes]
    unknown: frozenset[int]  # words of bank 0, by offset

    @staticmethod
    def of(
        cubin: Cubin, arguments: Sequence[Argument], grid: tuple[int, int, int], threads: int
    ) -> Constants:
        """arguments: one for each parameter of the cubin."""
        if len(arguments) != len(cubin.parameters):
            raise ValueError(
                f"{cubin.kernel} takes {len(cubin.parameters)} parameters, got {len(arguments)} arguments"
            )
        bank = bytearray(cubin.bank_size)
        unknown: set[int] = set()
        struct.pack_into("<III", bank, _THREADS_AT, threads, 1, 1)
        struct.pack_into("<III", bank, _GRID_AT, *grid)
        struct.pack_into("<I", bank, _STACK_AT, _STACK)
        struct.pack_into("<Q", bank, _BANK_ADDRESS_AT, BANK_ADDRESS + cubin.parameters_at)
        for parameter, argument in zip(cubin.parameters, arguments, strict=True):
            if argument is None:
                unknown.update(range(parameter.offset, parameter.offset + parameter.size, 4))
                continue
            content = _bytes_of(argument, parameter.size)
            bank[parameter.offset : parameter.offset + parameter.size] = content
        return Constants({**cubin.banks, 0: bytes(bank)}, frozenset(unknown))

    def word(self, bank: int, offset: int, size: int = 4) -> int | None:
        """What is there as an unsigned number; None where it is unknown or nothing."""
        content = self.banks.get(bank, b"")
        if not 0 <= offset <= len(content) - size or (bank == 0 and offset & ~3 in self.unknown):
            return None
        return int.from_bytes(content[offset : offset + size], "little")


@dataclass(frozen=True, slots=True)
class Integers:
    """What a tensor of integers holds, as far as a launch goes: element i is i * step."""

    step: int
    itemsize: int

    def word(self, at: Value, size: int) -> Value:
        """What lies at an address within the tensor."""
        if at is None:
            return None
        offset = at % ADDRESSES
        content: Value = (offset // self.itemsize * self.step >> 8 * (offset % self.itemsize)) & (
            1 << 8 * size
        ) - 1
        return content


Contents = Mapping[int, Integers]  # by the number of the argument


@dataclass(slots=True)
class BlockValues:
    """What the warps of a block share."""

    program: tuple[int, int, int]  # its ids
    constants: Constants
    initial: Mapping[str, Value]  # registers at the start, see `initial_values`
    contents: Contents | None = None  # None: nobody says


class WarpState:
    __slots__ = (
        "active",
        "at",
        "block",
        "exited",
        "guessed",
        "joins",
        "local",
        "mask",
        "pending",
        "registers",
        "warp",
    )

    def __init__(self, warp: int, block: BlockValues) -> None:
        self.warp = warp  # its number in the block
        self.block = block
        self.at = 0  # index of the next instruction
        self.registers = dict(block.initial)
        self.guessed = 0  # branches whose condition is unknown
        self.mask: Mask | None = None  # of the instruction being executed; None: all lanes
        self.active: Mask | None = None  # lanes on this way; None: all
        self.exited: Mask | None = None
        self.pending: list[tuple[int, Mask]] = []  # lanes that go on elsewhere, later
        self.joins: dict[str, tuple[Mask | None, int]] = {}  # by BSSY's register
        self.local: dict[int, Value] = {}  # spilled registers by address


def initial_values(cubin: Cubin, constants: Constants) -> dict[str, Value]:
    """The registers of a warp that starts: zeros, immediates and constants are known.

    What nobody has written may hold anything, so 0 will do: predicates are kept as bits of a register that is
    never cleared as a whole.
    """
    found: dict[str, Value] = {f"R{number}": 0 for number in range(255)}
    found |= {f"UR{number}": 0 for number in range(63)}
    found |= {f"P{number}": False for number in range(7)} | {f"UP{number}": False for number in range(7)}
    found |= {"RZ": 0, "URZ": 0, "SRZ": 0, "PT": True, "UPT": True, "#0": 0, f"#{WORD}": WORD}
    for operand in {text for one in cubin.instructions for text in one.operands}:
        for immediate in _IMMEDIATE.findall(operand):
            for word in (int(immediate, 16) & WORD, int(immediate, 16) >> 32 & WORD):
                found[f"#{word}"] = word
        for bank, offset in _CONSTANT.findall(operand):
            for at in (int(offset, 16), int(offset, 16) + 4):
                found[f"c[{int(bank, 16):#x}][{at:#x}]"] = constants.word(int(bank, 16), at)
    return found


def signed(value: Value) -> Value:
    """Of 32 bits."""
    return None if value is None else (value ^ 0x80000000) - 0x80000000


def first(value: Value, mask: Mask | None = None) -> int | None:
    """What the first active lane has."""
    if isinstance(value, np.ndarray):
        return int(value[0 if mask is None else int(mask.argmax())])
    return value


def _bytes_of(argument: int | float, size: int) -> bytes:
    if isinstance(argument, float):
        return struct.pack("<f" if size == 4 else "<d", argument)
    return (argument & (1 << 8 * size) - 1).to_bytes(size, "little")
