"""Rules that a kernel's compiled code may be held to, by name. No budget excuses what breaks one.

A name may have a value: "uses:LDG.128", "blocks:2".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from tpkernels.gate.ahead_of_time import Facts
from tpkernels.gate.disassembly import FP8_PRODUCTS
from tpkernels.gate.occupancy import SHARED_LIMIT, blocks_by_limit, too_few

Rule = Callable[[str, Facts], Iterator[str]]  # architecture, facts -> what is wrong
TENSOR_CORES = ("HGMMA", "UTCHMMA", "HMMA")  # products of 16 bits on sm_90, on sm_100, on any
WITH_WGMMA = ("sm_90",)
WITH_DESCRIPTORS = ("sm_90", "sm_100")
PROMOTED_AFTER = 4  # products of fp8, each 32 deep: their fp32 sums have fewer bits than fp32


def violations(rules: Sequence[str], architecture: str, facts: Facts) -> Iterator[str]:
    """Each rule that the facts break, in words; that a block can be launched, and runs, is always one."""
    if facts.shared > SHARED_LIMIT[architecture]:
        yield f"shared memory {facts.shared:,} > {SHARED_LIMIT[architecture]:,} bytes: cannot be launched"
    yield from facts.miscompiled
    for name in rules:
        rule = rule_named(name)
        assert rule is not None, name
        yield from rule(architecture, facts)


def rule_named(text: str) -> Rule | None:
    """None if there is no such rule, or if its value makes no sense."""
    name, colon, value = text.partition(":")
    if not colon:
        return RULES.get(name)
    try:
        return RULES_WITH_VALUE[name](value)
    except (KeyError, ValueError):
        return None


def _no_spills(architecture: str, facts: Facts) -> Iterator[str]:
    if architecture == "sm_90" and (facts.spills or facts.stack):
        yield f"spills: {facts.spills} loads and stores of local memory, {facts.stack} bytes of stack"


def _tensor_cores(architecture: str, facts: Facts) -> Iterator[str]:
    if architecture in WITH_WGMMA:
        names: tuple[str, ...] = ("HGMMA", "QGMMA", "HMMA")
    else:
        nvidia = ("UTCHMMA", "UTCQMMA", "HMMA", "QMMA")
        names = ("v_mfma",) if _is_amd(architecture) else nvidia
    if not any(map(facts.count, names)):
        yield f"no {' or '.join(names)}: no tensor core is used"


def _wgmma(architecture: str, facts: Facts) -> Iterator[str]:
    if architecture not in WITH_WGMMA:
        return
    if not facts.count("HGMMA") and not facts.count("QGMMA"):
        yield "no HGMMA or QGMMA"
    yield from _products_overlap(architecture, facts)
    yield from _absent(facts, "the tensor core's older instruction", "HMMA")


def _products_overlap(architecture: str, facts: Facts) -> Iterator[str]:
    """Products of warp groups are not awaited one by one.

    Between the products of fp8 that are promoted, their sums are added: they are awaited by necessity, but
    together, and the other warp group multiplies meanwhile.
    """
    if architecture not in WITH_WGMMA or facts.in_flight:
        return
    if facts.count("HGMMA") or (facts.count("QGMMA") and not _promoted(facts, "QGMMA")):
        yield "wgmma serialised: no product runs while the next operands are awaited"
    elif facts.count("QGMMA") < 2 * facts.count("QGMMA.gsb0"):
        yield "wgmma serialised: each product in fp8 is awaited before the next is started"


def _true_fp32(architecture: str, facts: Facts) -> Iterator[str]:
    """Products in fp32 have all of its bits: no tensor core of NVIDIA, and no short form of AMD's."""
    if _is_amd(architecture):
        if not facts.count("v_mfma"):  # which multiplies true fp32 as well
            yield "no v_mfma"
        yield from _absent(facts, "products in true fp32", "v_mfma.xf32")
        return
    if not facts.count("FFMA") and not facts.count("FFMA2"):
        yield "no FFMA or FFMA2"
    yield from _absent(facts, "products in true fp32", *TENSOR_CORES)


def _wide_offsets(architecture: str, facts: Facts) -> Iterator[str]:
    for product in facts.narrow_offsets:
        yield f"32-bit product in an address, wraps past 2**31 elements; cast a factor to tl.int64: {product}"


def _wide_sums(architecture: str, facts: Facts) -> Iterator[str]:
    for one in facts.narrow_sums:
        yield f"sum in {one}: rounded to 16 bits at each step; add up in fp32"


def _some(what: str, *instructions: str, on: Sequence[str] = ()) -> Rule:
    """The rule that code for these GPUs has one of these instructions. on: (): all of NVIDIA's"""

    def rule(architecture: str, facts: Facts) -> Iterator[str]:
        asked = architecture in on if on else not _is_amd(architecture)
        if asked and not any(map(facts.count, instructions)):
            yield f"no {' or '.join(instructions)}{what}"

    return rule


def _aligned(arguments: str) -> Rule:
    """The rule that the compiler knows these arguments to be multiples of 16."""

    def rule(architecture: str, facts: Facts) -> Iterator[str]:
        if lost := sorted({*arguments.split(",")} - facts.aligned - {""}):
            yield f"16-byte alignment lost: {', '.join(lost)}"

    return rule


def _blocks(count: str) -> Rule:
    """The rule that an SM holds so many blocks, which a persistent launch starts on it."""
    promised = int(count)

    def rule(architecture: str, facts: Facts) -> Iterator[str]:
        limits = blocks_by_limit(architecture, facts.registers, facts.threads, facts.shared)
        yield from too_few(promised, limits)

    return rule


def _fp8(sums: str) -> Rule:
    """The rule that fp8 is multiplied by the tensor core's own instruction, not as 16 bits an element.

    sums: "promoted" to fp32 now and then, or "fast": then none is, which would be for nothing
    """
    if sums not in ("promoted", "fast"):
        raise ValueError(sums)

    def rule(architecture: str, facts: Facts) -> Iterator[str]:
        product = FP8_PRODUCTS.get(architecture)
        if product is None:
            yield f"{architecture} multiplies no fp8: expected one of {', '.join(FP8_PRODUCTS)}"
            return
        yield from _some("", product)(architecture, facts)
        yield from _absent(facts, "fp8 is converted before it is multiplied", *TENSOR_CORES)
        if product == "UTCQMMA":  # which adds in fp32
            return
        begin = f"{facts.count(f'{product}.RZ')} of {facts.count(product)} products begin one"
        promoted = _promoted(facts, product)
        if sums == "promoted" and not promoted:
            yield f"sums of fp8 are not promoted: {begin}, expected each {PROMOTED_AFTER}th"
        elif sums == "fast" and promoted:
            yield f"sums of fp8 are promoted, though fast accumulation is asked for: {begin}"

    return rule


def _promoted(facts: Facts, product: str) -> bool:
    return PROMOTED_AFTER * facts.count(f"{product}.RZ") >= facts.count(product)


def _absent(facts: Facts, why: str, *instructions: str) -> Iterator[str]:
    for instruction in instructions:
        if facts.count(instruction):
            yield f"{facts.count(instruction)} {instruction}, expected none ({why})"


def _is_amd(architecture: str) -> bool:
    return architecture.startswith("gfx")


RULES: Mapping[str, Rule] = {
    "no_spills": _no_spills,  # on sm_90; elsewhere spills are budgeted
    "vector_loads": _some(": nothing loads 16 bytes at a time", "LDG.128", "LDGSTS.128", "UTMALDG"),
    "vector_stores": _some(": nothing stores 16 bytes at a time", "STG.128", "UTMASTG", "UTMAREDG"),
    "async_loads": _some(": nothing copies to shared memory meanwhile", "LDGSTS.128", "UTMALDG"),
    "tensor_cores": _tensor_cores,
    "wgmma": _wgmma,
    "tensor_memory": _some("", "UTCHMMA", "UTCQMMA", on=("sm_100",)),
    "products_overlap": _products_overlap,
    "true_fp32": _true_fp32,
    "descriptors": _some(": nothing is loaded through a descriptor", "UTMALDG", on=WITH_DESCRIPTORS),
    "wide_offsets": _wide_offsets,
    "wide_sums": _wide_sums,
    "reads_after_flags": lambda architecture, facts: iter(facts.unordered_reads),
    "flags_after_rows": lambda architecture, facts: iter(facts.unordered_flags),
}
RULES_WITH_VALUE: Mapping[str, Callable[[str], Rule]] = {
    "aligned": _aligned,  # arguments, by commas
    "blocks": _blocks,
    "fp8": _fp8,
    "uses": lambda instruction: _some("", instruction),  # on NVIDIA's GPUs
}
DEFAULT_RULES = ("no_spills",)
