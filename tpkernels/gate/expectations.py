"""What must hold of every compiled entry, whatever its numbers are; `budgets` holds the numbers.

These are rules, not measurements: updating the table of budgets cannot make one of them pass.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from tpkernels.gate.ahead_of_time import ARCHITECTURES, SHARED_LIMIT, Entry, Facts
from tpkernels.gate.machine_code import FP8_PRODUCTS
from tpkernels.gate.occupancy import blocks_by_limit, too_few

TENSOR_CORES = ("HGMMA", "UTCHMMA", "HMMA")  # products on sm_90, on sm_100, on any
MATMULS = (
    *("linear", "gather_linear", "scatter_linear", "glu", "dgrad", "dgrad_pairs", "dglu", "wgrad"),
    "scaled_linear",
)
PROMOTED_AFTER = 4  # products of fp8, each 32 deep: their fp32 sums have fewer bits than fp32
LOGITS = ("softmax_statistics", "cross_entropy_grad")
# integers that are multiples of nothing, and no part of a matrix's address
COUNTS = {
    *("first_tile", "first_chunk", "chunk_rows", "chunk_tiles", "spin_limit", "R", "rank", "splits"),
    *("columns", "first_id", "count", "code"),
    *(
        "stride_xst",
        "stride_wsn",
        "stride_st",
    ),  # from a row's scales to the next's, one of which is loaded at a time
}


def violations(entry: Entry, architecture: str, facts: Facts) -> Iterator[str]:
    """Each rule that the facts break, in words."""
    yield from _memory(entry, architecture, facts)
    yield from _addresses(entry, facts)
    yield from _order(entry, architecture, facts)
    if kernel_of(entry) in LOGITS and not architecture.startswith("gfx"):
        yield from _present(facts, "LDG.128")  # whatever the number of columns: padding is loaded too
    if kernel_of(entry) not in MATMULS:
        return
    if architecture.startswith("gfx"):
        yield from _amd_products(entry, facts)
        return
    yield from _nvidia_products(entry, architecture, facts)
    if entry.form == "descriptor":
        yield from _present(facts, "UTMALDG", _store_of(entry))
    if architecture == "sm_90":
        yield from _hopper(entry, facts)
    elif entry.form == "descriptor" and not _in_fp8(entry):
        yield from _present(facts, "UTCHMMA")


def kernel_of(entry: Entry) -> str:
    """The first word of its name but for an architecture: a kernel may be written in several files."""
    return next(part for part in entry.name.split("/") if part not in ARCHITECTURES)


def is_ragged(entry: Entry) -> bool:
    """Whether this is the form for addresses and sizes that are multiples of nothing."""
    return "ragged" in entry.name.split("/")


def overflow(architecture: str, facts: Facts) -> Iterator[str]:
    """More shared memory than a block may have."""
    if facts.shared > SHARED_LIMIT[architecture]:
        yield f"shared memory {facts.shared:,} > {SHARED_LIMIT[architecture]:,} bytes: cannot be launched"


def spilled(architecture: str, facts: Facts) -> Iterator[str]:
    """Local memory, where no rule of ours allows it."""
    if architecture == "sm_90" and (facts.spills or facts.stack):
        yield f"spills: {facts.spills} loads and stores of local memory, {facts.stack} bytes of stack"


def serialised(facts: Facts) -> Iterator[str]:
    """Products of warp groups that are awaited one by one.

    Between the products of fp8 that are promoted, their sums are added: they are awaited by necessity, but
    together, and the other warp group multiplies meanwhile.
    """
    if facts.in_flight:
        return
    if facts.count("HGMMA") or (facts.count("QGMMA") and not _promoted(facts, "QGMMA")):
        yield "wgmma serialised: no product runs while the next operands are awaited"
    elif facts.count("QGMMA") < 2 * facts.count("QGMMA.gsb0"):
        yield "wgmma serialised: each product in fp8 is awaited before the next is started"


def _memory(entry: Entry, architecture: str, facts: Facts) -> Iterator[str]:
    yield from overflow(architecture, facts)
    yield from spilled(architecture, facts)
    if promised := re.search(r"-x(\d+)", entry.name):
        limits = blocks_by_limit(architecture, facts.registers, facts.threads, facts.shared)
        yield from too_few(int(promised[1]), limits)


def _addresses(entry: Entry, facts: Facts) -> Iterator[str]:
    # every pointer and every size: not `entry.aligned`, which may be what has gone wrong
    promised = {name for name, kind in entry.arguments.items() if kind == "i32" or kind.startswith("*")}
    lost = sorted(promised - COUNTS - entry.unspecialised - facts.aligned)
    if lost and not is_ragged(entry):
        yield f"16-byte alignment lost: {', '.join(lost)}"
    for product in facts.narrow_offsets:
        yield f"32-bit product in an address, wraps past 2**31 elements; cast a factor to tl.int64: {product}"


def _order(entry: Entry, architecture: str, facts: Facts) -> Iterator[str]:
    """Rows are read after their flag, flags are raised after their rows, and warps wait for each other."""
    yield from facts.unordered_roles
    if architecture.startswith("gfx"):
        return
    if (kernel_of(entry) == "gather_linear" or entry.constants.get("WAIT")) and not is_ragged(entry):
        yield from facts.unordered_reads
    if kernel_of(entry) == "scatter_linear":
        yield from facts.unordered_flags


def _nvidia_products(entry: Entry, architecture: str, facts: Facts) -> Iterator[str]:
    if entry.form == "pointer" and not is_ragged(entry):
        # cp.async of 16 bytes: what pipelining consists of, and what a lost alignment takes away
        yield from _present(facts, "LDGSTS.128")
    if _in_fp8(entry):
        yield from _fp8_products(entry, architecture, facts)
        return
    if not _in_true_fp32(entry):
        yield from _some(facts, *TENSOR_CORES)
        return
    yield from _some(facts, "FFMA", "FFMA2")
    yield from _absent(facts, "products in true fp32", *TENSOR_CORES)


def _fp8_products(entry: Entry, architecture: str, facts: Facts) -> Iterator[str]:
    """By the tensor core's own instruction, not by an older one that is given 16 bits an element.

    Sums are promoted, unless the entry accumulates fast: then none is, which would be for nothing.
    """
    product = FP8_PRODUCTS.get(architecture)
    if product is None:
        yield f"{architecture} multiplies no fp8: expected one of {', '.join(FP8_PRODUCTS)}"
        return
    yield from _present(facts, product)
    yield from _absent(facts, "fp8 is converted before it is multiplied", *TENSOR_CORES)
    if product == "UTCQMMA":  # which adds in fp32
        return
    begin = f"{facts.count(f'{product}.RZ')} of {facts.count(product)} products begin one"
    promotes, promoted = entry.constants["PROMOTE"], _promoted(facts, product)
    if promotes and not promoted:
        yield f"sums of fp8 are not promoted: {begin}, expected each {PROMOTED_AFTER}th"
    elif promoted and not promotes:
        yield f"sums of fp8 are promoted, though fast accumulation is asked for: {begin}"


def _promoted(facts: Facts, product: str) -> bool:
    return PROMOTED_AFTER * facts.count(f"{product}.RZ") >= facts.count(product)


def _amd_products(entry: Entry, facts: Facts) -> Iterator[str]:
    yield from _present(facts, "v_mfma")  # which multiplies true fp32 as well
    if _in_true_fp32(entry):
        yield from _absent(facts, "products in true fp32", "v_mfma.xf32")


def _hopper(entry: Entry, facts: Facts) -> Iterator[str]:
    if entry.form == "descriptor" and not _in_fp8(entry):
        yield from _present(facts, "HGMMA")
        yield from _absent(facts, "the tensor core's older instruction", "HMMA")
    if consumers := re.search(r"-c(\d)", entry.name):
        yield from _apart(int(consumers[1]), facts)
    if not is_ragged(entry):
        yield from serialised(facts)
    if entry.form == "descriptor" and _in_fp8(entry) and facts.exposed_waits:
        yield f"{facts.exposed_waits} waits for copies that no product hides, expected none beside fp8"


def _apart(consumers: int, facts: Facts) -> Iterator[str]:
    """What kernels are written in roles for."""
    if facts.exposed_waits:
        yield f"{facts.exposed_waits} waits for copies that the same warps start, expected none of a consumer"
    if not facts.loads_during_stores:
        yield "no role of its own loads while results are stored"
    if consumers > 1 and not facts.products_during_stores:
        yield "no product can run while results are stored"


def _store_of(entry: Entry) -> str:
    """The instruction by which results leave a descriptor kernel."""
    if kernel_of(entry) == "scatter_linear":
        return "STG.128"  # into memory of other ranks, which no descriptor of ours describes
    return "UTMAREDG" if entry.constants.get("REDUCE") else "UTMASTG"


def _in_fp8(entry: Entry) -> bool:
    return "fp8" in next(iter(entry.arguments.values()))


def _in_true_fp32(entry: Entry) -> bool:
    first = next(iter(entry.arguments.values()))
    return "fp32" in first and entry.constants.get("PRECISION") != "tf32"


def _present(facts: Facts, *instructions: str) -> Iterator[str]:
    for instruction in instructions:
        if not facts.count(instruction):
            yield f"no {instruction}"


def _some(facts: Facts, *instructions: str) -> Iterator[str]:
    if not any(map(facts.count, instructions)):
        yield f"no {' or '.join(instructions)}"


def _absent(facts: Facts, why: str, *instructions: str) -> Iterator[str]:
    for instruction in instructions:
        if facts.count(instruction):
            yield f"{facts.count(instruction)} {instruction}, expected none ({why})"
