"""What is read off a compiled kernel: its code, parameters, constants and registers."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tpkernels.gate.clock.instructions import Instruction, parse
from tpkernels.gate.disassembly import CUDA_MACHINE, capability_of, disassemble, sections

_PARAM_CBANK, _KPARAM_INFO = 0x0A, 0x17  # attributes of .nv.info.<kernel>
_HALFWORD, _SIZED = 3, 4  # forms of an attribute: two bytes in place; a size and as many bytes


class WrongArchitecture(ValueError):
    """Not a kernel for sm_90, whose instructions alone are known here."""


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
