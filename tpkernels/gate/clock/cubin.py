"""A compiled sm_90 kernel as it is read: its instructions, parameters, constants and registers.

An instruction has 128 bits; cuobjdump prints the low 64, then the high 64. Its control fields, counted from
bit 0 of the whole:

    105-108 cycles to stall | 110-112 scoreboard of the result (7: none)
    113-115 scoreboard of the operands (7: none) | 116-121 mask of scoreboards to wait for
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tpkernels.gate.disassembly import CUDA_MACHINE, capability_of, disassemble, sections

_PARAM_CBANK, _KPARAM_INFO = 0x0A, 0x17  # attributes of .nv.info.<kernel>
_HALFWORD, _SIZED = 3, 4  # forms of an attribute: two bytes in place; a size and as many bytes
_LOW = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;\s*/\* 0x([0-9a-f]{16}) \*/\s*$")
_HIGH = re.compile(r"^\s+/\* 0x([0-9a-f]{16}) \*/\s*$")
_TEXT = re.compile(r"^(?:@(!?U?P\w+)\s+)?([A-Z][A-Z0-9_]*)((?:\.[A-Za-z0-9_]+)*)\s*(.*)$")
BYTES = 16  # of an instruction


class WrongArchitecture(ValueError):
    """Not a kernel for sm_90, whose instructions alone are known here."""


@dataclass(frozen=True, slots=True)
class Instruction:
    address: int
    guard: str  # "P0", "!UP1"; "": none
    opcode: str  # "HGMMA"
    modifiers: tuple[str, ...]  # ("64x256x16", "F32", "BF16")
    operands: tuple[str, ...]  # ("R24", "gdesc[UR8]", "R24", "gsb0")
    stall: int  # cycles until the next instruction of the warp may issue
    writes: int | None  # the scoreboard released when the result is there
    reads: int | None  # the scoreboard released when the operands are read
    waits: tuple[int, ...]  # scoreboards that must be released before it issues

    def __str__(self) -> str:
        guard = f"@{self.guard} " if self.guard else ""
        name = ".".join((self.opcode, *self.modifiers))
        return f"{self.address:#06x} {guard}{name} {', '.join(self.operands)}".rstrip()


@dataclass(frozen=True, slots=True)
class KernelParameter:
    """Where a parameter of a kernel lies."""

    offset: int  # in constant bank 0
    size: int


@dataclass(frozen=True, slots=True)
class Cubin:
    kernel: str
    instructions: tuple[Instruction, ...]
    registers: int  # a thread
    parameters: tuple[KernelParameter, ...]  # in the order of the launch
    parameters_at: int  # where they begin in constant bank 0
    banks: Mapping[int, bytes]  # constants that were compiled in; bank 0 is the launch's

    @property
    def bank_size(self) -> int:
        """Bytes of constant bank 0."""
        return max((one.offset + one.size for one in self.parameters), default=self.parameters_at)


def read(cubin: bytes) -> Cubin:
    """WrongArchitecture for anything but an sm_90 kernel; NoDisassembler without cuobjdump."""
    _check_architecture(cubin)
    found = list(sections(cubin))
    kernels = [one.name.removeprefix(".text.") for one in found if one.name.startswith(".text.")]
    if len(kernels) != 1:
        raise ValueError(f"expected a cubin with one kernel, got {kernels}")
    (kernel,) = kernels
    contents = {one.name: one.content for one in found}
    info = contents.get(f".nv.info.{kernel}", b"")
    begin, parameters = _parameters(info)
    listing = disassemble(cubin)
    usage = re.search(r"REG:(\d+)", listing)
    assert usage, "cuobjdump without a line of resource usage"
    banks = re.compile(r"\.nv\.constant(\d+)(?:\.|$)")
    return Cubin(
        kernel=kernel,
        instructions=parse(listing),
        registers=int(usage[1]),
        parameters=parameters,
        parameters_at=begin,
        banks={int(m[1]): one.content for one in found if (m := banks.match(one.name)) and m[1] != "0"},
    )


def _check_architecture(cubin: bytes) -> None:
    if cubin[:4] != b"\x7fELF" or len(cubin) < 64:
        raise WrongArchitecture("expected the cubin of an sm_90 kernel, got no ELF file")
    (machine,) = struct.unpack_from("<H", cubin, 18)
    if machine != CUDA_MACHINE:
        raise WrongArchitecture(f"expected the cubin of an sm_90 kernel, got code for ELF machine {machine}")
    if (capability := capability_of(cubin)) != 90:
        raise WrongArchitecture(f"expected the cubin of an sm_90 kernel, got one of sm_{capability}")


def _parameters(info: bytes) -> tuple[int, tuple[KernelParameter, ...]]:
    """Where bank 0 has the parameters, and each of them."""
    begin = 0x210  # of sm_90, for a kernel without parameters
    found: dict[int, KernelParameter] = {}
    for attribute, value in _attributes(info):
        if attribute == _PARAM_CBANK:
            _symbol, begin, _size = struct.unpack("<IHH", value)
        elif attribute == _KPARAM_INFO:
            _index, ordinal, offset, flags = struct.unpack("<IHHI", value)
            found[ordinal] = KernelParameter(offset, flags >> 18)
    ordered = (found[ordinal] for ordinal in range(len(found)))
    return begin, tuple(KernelParameter(begin + one.offset, one.size) for one in ordered)


def _attributes(info: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 4 <= len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == _SIZED:
            yield attribute, info[at : at + size]
            at += size
        elif form == _HALFWORD:
            yield attribute, size.to_bytes(2, "little")


def parse(listing: str) -> tuple[Instruction, ...]:
    """The instructions of a `cuobjdump -sass` listing of one kernel."""
    found: list[Instruction] = []
    pending: tuple[int, str] | None = None
    for line in listing.splitlines():
        if low := _LOW.match(line):
            pending = int(low[1], 16), low[2]
        elif (high := _HIGH.match(line)) and pending:
            found.append(_instruction(*pending, int(high[1], 16)))
            pending = None
    return tuple(found)


def _instruction(address: int, text: str, high: int) -> Instruction:
    match = _TEXT.match(text)
    assert match, f"not an instruction: {text!r}"
    guard, opcode, modifiers, operands = match.groups()
    control = high >> 41  # bit 105 of 128
    result, sources = control >> 5 & 7, control >> 8 & 7
    return Instruction(
        address=address,
        guard="" if guard is None or guard in ("PT", "UPT") else guard,
        opcode=opcode,
        modifiers=tuple(part for part in modifiers.split(".") if part),
        operands=_split(operands),
        stall=control & 15,
        writes=None if result == 7 else result,
        reads=None if sources == 7 else sources,
        waits=tuple(scoreboard for scoreboard in range(6) if control >> 11 >> scoreboard & 1),
    )


def _split(operands: str) -> tuple[str, ...]:
    """At the commas outside brackets, without the hint that an operand is used again."""
    parts, depth, start = [], 0, 0
    for at, sign in enumerate(operands):
        depth += (sign == "[") - (sign == "]")
        if sign == "," and not depth:
            parts.append(operands[start:at])
            start = at + 1
    if operands:
        parts.append(operands[start:])
    return tuple(part.strip().replace(".reuse", "") for part in parts)
