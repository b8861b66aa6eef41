"""Rules that owners of a kernel may hold it to. Budgets cannot excuse what breaks one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from tpkernels.gate.ahead_of_time import Facts
from tpkernels.gate.expectations import overflow, serialised, spilled

Rule = Callable[[str, Facts], Iterator[str]]  # architecture, facts -> what is wrong
WITH_WGMMA = ("sm_90",)
WITH_DESCRIPTORS = ("sm_90", "sm_100")


def violations(rules: Sequence[str], architecture: str, facts: Facts) -> Iterator[str]:
    """Each rule that the facts break, in words; that a block can be launched is always one."""
    yield from overflow(architecture, facts)
    for rule in rules:
        yield from RULES[rule](architecture, facts)


def _tensor_cores(architecture: str, facts: Facts) -> Iterator[str]:
    if architecture in WITH_WGMMA:
        names: tuple[str, ...] = ("HGMMA", "QGMMA", "HMMA")
    else:
        nvidia = ("UTCHMMA", "UTCQMMA", "HMMA", "QMMA")
        names = ("v_mfma",) if architecture.startswith("gfx") else nvidia
    if not any(map(facts.count, names)):
        yield f"no {' or '.join(names)}: no tensor core is used"


def _wgmma(architecture: str, facts: Facts) -> Iterator[str]:
    if architecture not in WITH_WGMMA:
        return
    if not facts.count("HGMMA") and not facts.count("QGMMA"):
        yield "no HGMMA or QGMMA"
    yield from serialised(facts)
    if facts.count("HMMA"):
        yield f"{facts.count('HMMA')} HMMA, expected none (the tensor core's older instruction)"


def _descriptors(architecture: str, facts: Facts) -> Iterator[str]:
    if architecture in WITH_DESCRIPTORS and not facts.count("UTMALDG"):
        yield "no UTMALDG: nothing is loaded through a descriptor"


def _wide_offsets(architecture: str, facts: Facts) -> Iterator[str]:
    for product in facts.narrow_offsets:
        yield f"32-bit product in an address, wraps past 2**31 elements; cast a factor to tl.int64: {product}"


def _some(what: str, *instructions: str) -> Rule:
    """The rule that NVIDIA's code has one of these instructions."""

    def rule(architecture: str, facts: Facts) -> Iterator[str]:
        if not architecture.startswith("gfx") and not any(map(facts.count, instructions)):
            yield f"no {' or '.join(instructions)}: nothing {what}"

    return rule


RULES: Mapping[str, Rule] = {
    "no_spills": spilled,  # on sm_90; elsewhere spills are budgeted
    "vector_loads": _some("loads 16 bytes at a time", "LDG.128", "LDGSTS.128", "UTMALDG"),
    "vector_stores": _some("stores 16 bytes at a time", "STG.128", "UTMASTG", "UTMAREDG"),
    "async_loads": _some("copies to shared memory meanwhile", "LDGSTS.128", "UTMALDG"),
    "tensor_cores": _tensor_cores,
    "wgmma": _wgmma,
    "descriptors": _descriptors,
    "wide_offsets": _wide_offsets,
}
DEFAULT_RULES = ("no_spills",)
