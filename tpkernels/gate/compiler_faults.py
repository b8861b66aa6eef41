"""Wrong machine code, told from PTX and SASS: what must be there, and what versions of ptxas are known for.

A finding is a wrong result, or a kernel of the form that is reported to give one; no budget excuses it.
"""

from __future__ import annotations

import re
import struct
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from inspect import signature
from typing import NamedTuple

from tpkernels.gate.products_in_flight import raced_products

Version = tuple[int, ...]  # (12, 8, 93)
NVIDIA = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")
TRITON = "github.com/triton-lang/triton"


class Ptxas(NamedTuple):
    """The assembler that Triton takes for a GPU."""

    path: str
    version: Version
    variable: str  # which names another

    def __str__(self) -> str:
        return ".".join(map(str, self.version))


class Fault(NamedTuple):
    """What compilers make wrongly, and versions of ptxas that are known to."""

    shows: Callable[[str, str], Iterator[str]]  # PTX, SASS -> what is wrong, in words
    architectures: tuple[str, ...]
    first: Version = ()  # of those that were tried, with the fault
    fixed: Version = ()  # the first without it
    report: str = ""  # "": of no version
    only_of_versions: bool = False  # what it shows is wrong by these alone


def ptxas_of(architecture: str) -> Ptxas:
    """What Triton assembles with; RuntimeError or OSError if there is none."""
    import triton
    from triton.backends.nvidia.compiler import get_ptxas

    number = [int(architecture.removeprefix("sm_"))] if signature(get_ptxas).parameters else []
    path = get_ptxas(*number).path  # until Triton 3.5 one for all GPUs
    is_older = path == triton.knobs.nvidia.ptxas.path
    return Ptxas(path, _version(path), f"TRITON_PTXAS{'' if is_older else '_BLACKWELL'}_PATH")


@cache
def _version(path: str) -> Version:
    told = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"\bV(\d+(?:\.\d+)+)", told)
    if found is None:
        raise RuntimeError(f"{path} tells no version")
    return tuple(map(int, found[1].split(".")))


def ptxas_in_use() -> str:
    """Name each assembler of Triton with its version, GPUs and path, in a line."""
    users: dict[Ptxas, list[str]] = {}
    try:
        for architecture in NVIDIA:
            users.setdefault(ptxas_of(architecture), []).append(architecture)
    except (ImportError, OSError, RuntimeError, subprocess.SubprocessError) as error:
        return f"cannot be asked: {error}"
    return "; ".join(f"{tool} for {', '.join(gpus)} ({tool.path})" for tool, gpus in users.items())


def miscompiled(ptx: str, sass: str, architecture: str, ptxas: Ptxas) -> tuple[str, ...]:
    """Say what is wrong in the machine code of a kernel, where that is known, and what to do."""
    return tuple(
        f"{what}{_cure(fault, ptxas)}"
        for fault in FAULTS
        if architecture in fault.architectures
        and (not fault.only_of_versions or fault.first <= ptxas.version < fault.fixed)
        for what in fault.shows(ptx, sass)
    )


def _cure(fault: Fault, ptxas: Ptxas) -> str:
    if not fault.report:
        return f"; assembled by ptxas {ptxas}"
    first, fixed = (".".join(map(str, version)) for version in (fault.first, fault.fixed))
    known = f"; ptxas {first} until {fixed} is known for it ({fault.report})"
    if ptxas.version < fault.fixed:
        return f"{known}, this is {ptxas}: set {ptxas.variable} to that of CUDA {fixed} or later"
    return f"{known}, this is {ptxas}"


def _races(_ptx: str, sass: str) -> Iterator[str]:
    """By ptxas or by Triton, whose pipelined loops load what a product reads from registers too early."""
    for race in raced_products(sass):
        yield f"{race}: by ptxas, or by Triton ({TRITON}/issues/9433), then num_stages=1 cures it"


_PACKED_SUM = re.compile(r"\b(VIADD\.16x2 [^;]*, 0x0)\s*;")


def _lost_in_packed_sums(_ptx: str, sass: str) -> Iterator[str]:
    """A constant that is 0 is written RZ: an immediate of 0 was another number."""
    if "VIADD.16x2" in sass:
        for found in dict.fromkeys(_PACKED_SUM.findall(sass)):
            yield f"`{found}` adds nothing: the constant of a packed 16-bit sum is lost"


_SUM = re.compile(r"\s*(?:@!?%p\d+\s+)?(?:mul|add|sub|fma)(?:\.rn)?(?:\.ftz)?\.f32\s")
_CONSTANT = re.compile(r"\b0f([0-9A-F]{8})\b")
_NEVER = re.compile(r"\bmov\.pred\s+%p\d+, 0;")  # what it guards is dropped, with its constants
_NUMBER = re.compile(r"(?<![\w.\[-])-?(\d+(?:\.\d+)?(?:e[+-]\d+)?)(?![\w.])")
_WORD = re.compile(r"\b0x([0-9a-f]{6,8})\b")
_HALVES = re.compile(r"\bHFMA2\S* R\d+, -RZ, RZ, (-?[\d.e+-]+), (-?[\d.e+-]+)\s*;")  # makes a constant


def _lost_in_sums(ptx: str, sass: str) -> Iterator[str]:
    """Constants of fp32 that arrive nowhere; those of few bits may have become another instruction."""
    lines = [line for line in ptx.splitlines() if "0f" in line and _SUM.match(line)]
    words = {int(word, 16) & 0x7FFFFFFF for line in lines for word in _CONSTANT.findall(line)}
    wanted = {word: _fp32(word) for word in words if word & 0xFFF and word < 0x7F800000}  # finite
    lost = [word for word, value in wanted.items() if f"{value:.20g}" not in sass and hex(word) not in sass]
    if not lost or _NEVER.search(ptx):
        return
    arrived = {int(word, 16) & 0x7FFFFFFF for word in _WORD.findall(sass)}  # also in other words
    for number in {float(text) for text in set(_NUMBER.findall(sass))}:
        with suppress(OverflowError):
            arrived.add(int.from_bytes(struct.pack("<f", number), "little"))
    for high, low in set(_HALVES.findall(sass)):
        arrived.add(int.from_bytes(struct.pack("<ee", float(low), float(high)), "little") & 0x7FFFFFFF)
    for word in sorted({*lost} - arrived):
        told = f"the constant {wanted[word]:.9g} of an fp32 sum or product in PTX"
        yield f"{told} is lost: it is nowhere in SASS"


def _fp32(word: int) -> float:
    (value,) = struct.unpack("<f", word.to_bytes(4, "little"))
    return float(value)


_LOST_NEGATION = re.compile(r"\b(VIMNMX3(?:\.\w+)* R\d+, (R\d+)(?:\.reuse)?, \2(?:\.reuse)?, [^;]*)\s*;")


def _lost_negations(ptx: str, sass: str) -> Iterator[str]:
    """max(x, x, y) stands where max(x, -x, y) was meant."""
    if "VIMNMX3" in sass and "neg.s32" in ptx:
        for found, _register in dict.fromkeys(_LOST_NEGATION.findall(sass)):
            yield f"`{found}` compares a number with itself: the negation in max(x, -x) is lost"


_MASKED_LOAD = re.compile(r"@!?P\d\s+LDG\.E(?:\.\w+)*\.U16\b")
_NARROW_STORE = re.compile(r"\bSTS(?:\.\w+)*\.U16\b")
_KEPT_MASK = re.compile(r"@!?P\d\s+LOP3\.LUT (R\d+), \1(?:\.reuse)?, 0x[0-9a-f]+, RZ, 0xfc, !PT")


def _kept_masks(_ptx: str, sass: str) -> Iterator[str]:
    """What the reported kernels share, not the fault itself."""
    kept = len(_KEPT_MASK.findall(sass))
    if kept and "GMMA." in sass and _MASKED_LOAD.search(sass) and _NARROW_STORE.search(sass):
        yield (
            f"{kept} masks of 16-bit loads for a product are kept as bits of a register, as in kernels that "
            "were wrong or wrote outside shared memory: load even widths"
        )


FAULTS = (
    Fault(_races, ("sm_90",), (12, 9), (13, 3), f"{TRITON}/pull/11781"),
    Fault(_lost_in_packed_sums, ("sm_90", "sm_100", "sm_120"), (12, 8), (13, 3), f"{TRITON}/issues/11581"),
    Fault(_lost_in_sums, NVIDIA),
    Fault(
        _lost_negations, ("sm_100", "sm_120"), (12, 8), (13, 4), "github.com/pytorch/pytorch/issues/190973"
    ),
    Fault(
        _kept_masks,
        ("sm_90",),
        first=(12, 8),
        fixed=(13, 1),
        report="github.com/fla-org/flash-linear-attention/pull/1262",
        only_of_versions=True,
    ),
)
