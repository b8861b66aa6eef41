"""Machine code of NVIDIA's GPUs as text, by the disassemblers that Triton brings along.

To start, nvdisasm takes longer than ptxas takes for a kernel. So the code of several kernels is laid end to
end and disassembled at once, and each kernel's part is read as if it began at address 0.

What a disassembly says of a kernel: counts of the instructions that decide its speed. No Triton.

An NVIDIA opcode is counted by its first word (`HGMMA.64x256x16.F32.BF16` is an HGMMA), and its 16-byte form
apart (`LDGSTS.128`): that is what a lost alignment takes away. Of global memory each width is counted.
Products of fp8 are counted apart, too, where they begin a sum (`QGMMA.RZ`: they are added to zero) and where
they end a batch (`QGMMA.gsb0`), which is awaited together. An AMD opcode is counted by its family, and a
matrix product of fp32 with fewer bits apart (`v_mfma.xf32`).
"""

from __future__ import annotations

import re
import struct
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

FP8_PRODUCTS = {"sm_89": "QMMA", "sm_90": "QGMMA", "sm_100": "UTCQMMA", "sm_120": "QMMA"}  # of tensor cores
NVIDIA_MIX = (
    *("HGMMA", "UTCHMMA", "HMMA"),  # tensor cores of sm_90, sm_100, older
    *("QGMMA", "UTCQMMA", "QMMA"),  # in fp8: of sm_90, sm_100, sm_89 and sm_120
    *("FFMA", "FFMA2", "MUFU"),  # plain, two at once, transcendental
    *("UTMALDG", "UTMASTG", "UTMAREDG"),  # the copy engine: load, store, reduce
    *("LDGSTS", "LDG", "STG", "LDS", "STS"),  # cp.async; global and shared memory
    *("STL", "LDL"),  # local memory: spills
)
GLOBAL = ("LDG", "STG", "LDGSTS")  # each width of which is counted apart
WIDTHS = {"256": 32, "128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}  # bytes; another access has 4
AMD_MIX = ("v_mfma", "v_fma", "buffer_load", "global_load", "global_store", "ds_read", "ds_write", "scratch")

_SASS_OPCODE = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE)
_FP8_PRODUCT = re.compile(r"\b(Q(?:G)?MMA)\.\S+ ([^;]*)")
_OF_A_SUM = ("RZ", "gsb0")  # among the operands: added to zero; the last of its batch
_AMD_OPCODE = re.compile(rf"^\s+({'|'.join(AMD_MIX)})", re.MULTILINE)
_AMD_XF32 = re.compile(r"^\s+v_mfma_\w+_xf32\b", re.MULTILINE)
_AMD_ANY = re.compile(r"^\s+[vs]_|^\s+(?:buffer|global|flat|ds|scratch)_", re.MULTILINE)
_PRODUCT_OR_WAIT = re.compile(r"\b[A-Z]GMMA\.|WARPGROUP\.DEPBAR\.LE gsb0, 0x([0-9a-f]+)")


def sass_mix(sass: str) -> dict[str, int]:
    """Instruction counts of a `cuobjdump -sass` listing; absent is zero."""
    mix = Counter[str]()
    for opcode in _SASS_OPCODE.findall(sass):
        family, *modifiers = opcode.split(".")
        mix["all"] += 1
        if family in NVIDIA_MIX:
            mix[family] += 1
            width = next((word for word in modifiers if word in WIDTHS), "")
            if width == "128" or (width and family in GLOBAL):
                mix[f"{family}.{width}"] += 1
    for family, text in _FP8_PRODUCT.findall(sass):
        operands = re.split(r"[,\s]+", text)
        for word in _OF_A_SUM:
            mix[f"{family}.{word}"] += word in operands
    return _present(mix)


def wgmma_in_flight(sass: str) -> int:
    """How many batches of asynchronous products the kernel lets run while it does something else; 0: none.

    A serialised kernel waits for zero after each batch, so that loads and tensor cores take turns. A wait
    that follows another, with no product in between, leaves no more in flight than the first has left.
    """
    most, left = 0, None
    for pending in _PRODUCT_OR_WAIT.findall(sass):
        if not pending:
            left = None
            continue
        left = int(pending, 16) if left is None else min(left, int(pending, 16))
        most = max(most, left)
    return most


def amd_mix(assembly: str) -> dict[str, int]:
    """Instruction counts of AMD assembly; absent is zero."""
    mix = Counter(_AMD_OPCODE.findall(assembly))
    mix["v_mfma.xf32"] = len(_AMD_XF32.findall(assembly))
    mix["all"] = len(_AMD_ANY.findall(assembly))
    return _present(mix)


def amd_resources(assembly: str) -> tuple[int, int, int]:
    """(vector registers, bytes of stack, spilled registers) from the metadata at the end of AMD assembly."""

    def number(key: str) -> int:
        found = re.search(rf"^\s+\.{key}:\s+(\d+)", assembly, re.MULTILINE)
        return int(found[1]) if found else 0

    spilled = number("vgpr_spill_count") + number("sgpr_spill_count")
    return number("vgpr_count"), number("private_segment_fixed_size"), spilled


def _present(mix: Mapping[str, int]) -> dict[str, int]:
    return {name: count for name, count in mix.items() if count}


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
        _listings.clear()  # one is enough
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
