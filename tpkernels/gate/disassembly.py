"""Machine code of NVIDIA's GPUs as text, by the disassemblers that Triton brings along.

To start, nvdisasm takes longer than ptxas takes for a kernel. So the code of several kernels is laid end to
end and disassembled at once, and each kernel's part is read as if it began at address 0.
"""

from __future__ import annotations

import re
import struct
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

CUDA_MACHINE = 190  # of an ELF file
BYTES = 16  # of an instruction
# whose last operand is the address of an instruction
_JUMPS = re.compile(r"\b(?:BRA|CALL\.REL|RET\.REL|BSSY|WARPSYNC\.COLLECTIVE)\b.*\b0x([0-9a-f]+)\s*;")
_AT = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/")
_listings: dict[bytes, str] = {}  # of what was disassembled last


class NoDisassembler(RuntimeError):
    """A disassembler is not where Triton says, or does not run."""


@dataclass(frozen=True, slots=True)
class Section:
    name: str
    content: bytes


def disassemble(cubin: bytes) -> str:
    """A listing with control fields, after a line of resource usage: "REG:200 STACK:0 SHARED:1024 ..."."""
    if cubin not in _listings:
        _listings.clear()  # what was compiled is clocked next: one is enough
        _listings[cubin] = _usage(cubin) + _run("cuobjdump", "-sass", cubin)
    return _listings[cubin]


def disassemble_ahead(cubins: Sequence[bytes]) -> None:
    """Many kernels for one GPU at once: `disassemble` has their listings, until others are asked for."""
    texts = [code for cubin in cubins if (code := _code(cubin)) is not None]
    if not 1 < len(texts) == len(cubins):
        return
    listing = _run("nvdisasm", "-hex", "-novliw", "-b", f"SM{capability_of(cubins[0])}", b"".join(texts))
    _listings.clear()
    parts = _parts(listing, [len(text) for text in texts])
    for cubin, text, part in zip(cubins, texts, parts, strict=True):
        if len(part) * BYTES == len(text):
            _listings[cubin] = _usage(cubin) + "\n".join(part)


def capability_of(cubin: bytes) -> int:
    """90 of an sm_90 kernel."""
    (flags,) = struct.unpack_from("<I", cubin, 48)
    # CUDA 13 moved the number one byte up, and says so by another ABI
    return int((flags >> 8 if cubin[7] == 0x41 else flags) & 0xFF)


def sections(elf: bytes) -> Iterator[Section]:
    (table,) = struct.unpack_from("<Q", elf, 40)
    size, count, names_at = struct.unpack_from("<HHH", elf, 58)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + number * size) for number in range(count)]
    names = headers[names_at][4]
    for name, kind, _flags, _address, offset, length in headers:
        start = names + name
        text = elf[start : elf.index(b"\0", start)].decode()
        yield Section(
            text, b"" if kind == 8 else elf[offset : offset + length]
        )  # 8: takes no room in the file


def _code(cubin: bytes) -> bytes | None:
    """Of the one kernel that is there."""
    found = [one.content for one in sections(cubin) if one.name.startswith(".text.")]
    return found[0] if len(found) == 1 else None


def _parts(listing: str, sizes: Sequence[int]) -> list[list[str]]:
    """The instructions of each kernel, two lines each, with addresses from 0."""
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    parts: list[list[str]] = [[] for _ in sizes]
    at = 0
    lines = iter(listing.splitlines())
    for line in lines:
        if not (found := _AT.match(line)):
            continue
        address = int(found[1], 16)
        while at + 1 < len(starts) and address >= starts[at + 1]:
            at += 1
        start = starts[at]
        if start and (jump := _JUMPS.search(line)) and 0 <= int(jump[1], 16) - start <= sizes[at]:
            line = f"{line[: jump.start(1)]}{int(jump[1], 16) - start:x}{line[jump.end(1) :]}"
        line = f"        /*{address - start:04x}*/{line[found.end() :]}"
        parts[at].append(f"{line}\n{next(lines)}")
    return parts


def _usage(cubin: bytes) -> str:
    return _run("cuobjdump", "-res-usage", cubin)


def _run(tool: str, *arguments: str | bytes) -> str:
    """What a tool prints; bytes stand for a file."""
    try:
        with TemporaryDirectory(prefix="tpkernels-") as folder:
            path = Path(folder) / "code"
            command = [_tool(tool)]
            for argument in arguments:
                if isinstance(argument, bytes):
                    path.write_bytes(argument)
                command.append(argument if isinstance(argument, str) else str(path))
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except subprocess.CalledProcessError as error:
        raise NoDisassembler(f"{tool} failed: {error.stderr.strip()}") from error
    except (OSError, RuntimeError) as error:
        raise NoDisassembler(f"{tool}, which Triton brings along, is missing: {error}") from error


def _tool(name: str) -> str:
    import triton

    return str(getattr(triton.knobs.nvidia, name).path)  # as brought along, or TRITON_CUOBJDUMP_PATH
