"""What a disassembly says of a kernel: counts of the instructions that decide its speed. No Triton.

An NVIDIA opcode is counted by its first word (`HGMMA.64x256x16.F32.BF16` is an HGMMA), and its 16-byte form
apart (`LDGSTS.128`): that is what a lost alignment takes away. Products of fp8 are counted apart, too, where
they begin a sum (`QGMMA.RZ`: they are added to zero) and where they end a batch (`QGMMA.gsb0`), which is
awaited together; so are copies into several blocks (`UTMALDG.MULTICAST`). An AMD opcode is counted by its
family, and a matrix product of fp32 with fewer bits apart (`v_mfma.xf32`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

FP8_PRODUCTS = {"sm_89": "QMMA", "sm_90": "QGMMA", "sm_100": "UTCQMMA", "sm_120": "QMMA"}  # of tensor cores
NVIDIA_MIX = (
    *("HGMMA", "UTCHMMA", "HMMA"),  # tensor cores of sm_90, sm_100, older
    *("QGMMA", "UTCQMMA", "QMMA"),  # in fp8: of sm_90, sm_100, sm_89 and sm_120
    *("FFMA", "FFMA2", "MUFU"),  # plain, two at once, transcendental
    *("UTMALDG", "UTMASTG", "UTMAREDG"),  # the copy engine: load, store, reduce
    *("LDGSTS", "LDG", "STG", "LDS", "STS"),  # cp.async; global and shared memory
    *("STL", "LDL"),  # local memory: spills
)
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
            mix[f"{family}.128"] += "128" in modifiers
            mix[f"{family}.MULTICAST"] += "MULTICAST" in modifiers
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
