"""What must hold of every compiled entry, whatever its numbers are; `budgets` holds the numbers.

These are rules, not measurements: updating the table of budgets cannot make one of them pass.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from tpkernels.gate.ahead_of_time import ARCHITECTURES, SHARED_LIMIT, Entry, Facts
from tpkernels.gate.occupancy import blocks_by_limit, too_few
from tpkernels.gate.ptx import NO_FLAG

TENSOR_CORES = ("HGMMA", "UTCHMMA", "HMMA")  # products on sm_90, on sm_100, on any
MATMULS = ("linear", "gather_linear", "scatter_linear", "glu", "dgrad", "dgrad_pairs", "dglu", "wgrad")
LOGITS = ("softmax_statistics", "cross_entropy_grad")
# integers that are multiples of nothing, and no part of a matrix's address
COUNTS = {
    *("first_tile", "first_chunk", "chunk_rows", "chunk_tiles", "spin_limit", "R", "rank", "splits"),
    *("columns", "first_id", "count", "code"),
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
    yield from _nvidia_products(entry, facts)
    if entry.form == "descriptor":
        yield from _present(facts, "UTMALDG", _store_of(entry))
    if architecture == "sm_90":
        yield from _hopper(entry, facts)
    elif entry.form == "descriptor":
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
        yield f"32-bit product in an address, wraps past 2**31 elements: {product}"


def _order(entry: Entry, architecture: str, facts: Facts) -> Iterator[str]:
    """Rows are read after their flag, flags are raised after their rows, and warps wait for each other."""
    yield from facts.unordered_roles
    if architecture.startswith("gfx"):
        return
    if (kernel_of(entry) == "gather_linear" or entry.constants.get("WAIT")) and not is_ragged(entry):
        yield from facts.unordered_reads
    if kernel_of(entry) == "scatter_linear":
        yield from facts.unordered_flags
    if entry.function == "_publish_kernel" and NO_FLAG in facts.unordered_flags:
        yield NO_FLAG


def _nvidia_products(entry: Entry, facts: Facts) -> Iterator[str]:
    if entry.form == "pointer" and not is_ragged(entry):
        # cp.async of 16 bytes: what pipelining consists of, and what a lost alignment takes away
        yield from _present(facts, "LDGSTS.128")
    if not _in_true_fp32(entry):
        yield from _some(facts, *TENSOR_CORES)
        return
    yield from _some(facts, "FFMA", "FFMA2")
    yield from _absent(facts, "products in true fp32", *TENSOR_CORES)


def _amd_products(entry: Entry, facts: Facts) -> Iterator[str]:
    yield from _present(facts, "v_mfma")  # which multiplies true fp32 as well
    if _in_true_fp32(entry):
        yield from _absent(facts, "products in true fp32", "v_mfma.xf32")


def _hopper(entry: Entry, facts: Facts) -> Iterator[str]:
    if entry.form == "descriptor":
        yield from _present(facts, "HGMMA")
        yield from _absent(facts, "the tensor core's older instruction", "HMMA")
    if consumers := re.search(r"-c(\d)", entry.name):
        yield from _apart(int(consumers[1]), facts)
    if facts.count("HGMMA") and not facts.in_flight and not is_ragged(entry):
        yield "wgmma serialised: no product runs while the next operands are awaited"


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
