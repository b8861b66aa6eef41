"""What a disassembly says of a kernel: counts of the instructions that decide its speed. No Triton.

An NVIDIA opcode is counted by its first word (`HGMMA.64x256x16.F32.BF16` is an HGMMA), and its 16-byte form
apart (`LDGSTS.128`): that is what a lost alignment takes away. An AMD opcode is counted by its family, and a
matrix product of fp32 with fewer bits apart (`v_mfma.xf32`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

NVIDIA_MIX = (
    *("HGMMA", "UTCHMMA", "HMMA"),  # tensor cores of sm_90, sm_100, older
    *("FFMA", "FFMA2", "MUFU"),  # plain, two at once, transcendental
    *("UTMALDG", "UTMASTG", "UTMAREDG"),  # the copy engine: load, store, reduce
    *("LDGSTS", "LDG", "STG", "LDS", "STS"),  # cp.async; global and shared memory
    *("STL", "LDL"),  # local memory: spills
)
AMD_MIX = ("v_mfma", "v_fma", "buffer_load", "global_load", "global_store", "ds_read", "ds_write", "scratch")

_SASS_OPCODE = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE)
_AMD_OPCODE = re.compile(rf"^\s+({'|'.join(AMD_MIX)})", re.MULTILINE)
_AMD_XF32 = re.compile(r"^\s+v_mfma_\w+_xf32\b", re.MULTILINE)
_AMD_ANY = re.compile(r"^\s+[vs]_|^\s+(?:buffer|global|flat|ds|scratch)_", re.MULTILINE)
_WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x([0-9a-f]+)")


def sass_mix(sass: str) -> dict[str, int]:
    """Instruction counts of a `cuobjdump -sass` listing; absent is zero."""
    mix = Counter[str]()
    for opcode in _SASS_OPCODE.findall(sass):
        family, *modifiers = opcode.split(".")
        mix["all"] += 1
        if family in NVIDIA_MIX:
            mix[family] += 1
            mix[f"{family}.128"] += "128" in modifiers
    return _present(mix)


def wgmma_in_flight(sass: str) -> int:
    """How many batches of asynchronous products the kernel lets run while it does something else; 0: none.

    A serialised kernel waits for zero after each batch, so that loads and tensor cores take turns.
    """
    return max((int(pending, 16) for pending in _WAIT.findall(sass)), default=0)


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
