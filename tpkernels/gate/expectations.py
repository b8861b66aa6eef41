"""What must hold of every compiled entry: rules, and a table of what each entry may use.

Rules are no measurements: updating the table, `kernels/budgets.json`, cannot make one of them pass. The table
is per Triton version and architecture.
Compiling is deterministic, so a budget has no tolerance: shared memory to the byte, registers to the next
multiple of 8, in which the hardware hands them out. Another minor version of Triton allocates registers
differently, hence a table of its own for each. Spills are budgeted where no rule forbids them altogether.
What an epilogue waits for may not grow either, and what runs during it may not be lost.
The counts of instructions are no ceilings: any other count is told, by the very version that they come from.
So are other cycles of a step and of an edge, slower or faster. The clock gives the same cycles for the same
machine code; what is tolerated is that a few instructions are in another order.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpkernels.files import parsed, read_text
from tpkernels.gate.ahead_of_time import ARCHITECTURES, SHARED_LIMIT, Entry, Facts
from tpkernels.gate.disassembly import FP8_PRODUCTS
from tpkernels.gate.occupancy import blocks_by_limit, too_few
from tpkernels.kernels.footprints import TABLE

if TYPE_CHECKING:
    from tpkernels.gate.clock.cost import Cost, Stretch

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
    if "-ws" in entry.name:
        yield from _specialized(entry, facts)
    if architecture == "sm_90":
        yield from _hopper(entry, facts)
    elif entry.form == "descriptor" and not _in_fp8(entry):
        yield from _present(facts, "UTCHMMA")
        if "-b2/" in entry.name:
            yield from _present(facts, "UTCHMMA.2CTA")
            yield from _local_memory(facts)


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
    if architecture == "sm_90":
        yield from _local_memory(facts)


def _local_memory(facts: Facts) -> Iterator[str]:
    if facts.spills or facts.stack:
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
    promotes, promoted = entry.constants.get("PROMOTE", False), _promoted(facts, product)
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
        yield from _apart(entry, int(consumers[1]), facts)
    if "-b2" in entry.name:
        yield from _present(facts, "UTMALDG.MULTICAST")
    if not is_ragged(entry):
        yield from serialised(facts)
    if entry.form == "descriptor" and _in_fp8(entry) and facts.exposed_waits:
        yield f"{facts.exposed_waits} waits for copies that no product hides, expected none beside fp8"


def _apart(entry: Entry, consumers: int, facts: Facts) -> Iterator[str]:
    """What kernels are written in roles for."""
    if facts.exposed_waits:
        yield f"{facts.exposed_waits} waits for copies that the same warps start, expected none of a consumer"
    if not facts.loads_during_stores:
        yield "no role of its own loads while results are stored"
    if consumers > 1 and not facts.products_during_stores:
        yield "no product can run while results are stored"
    if _adds(entry):
        constants: Any = entry.constants["P"]
        boxes = constants.parts * max(1, 4 * constants.part // 128)  # of 128 bytes a row
        if (found := facts.count("UTMAREDG")) != boxes:
            yield f"{found} UTMAREDG, expected {boxes}: a sum is added once"


def _specialized(entry: Entry, facts: Facts) -> Iterator[str]:
    """What is asked of Triton's own roles: it may leave them out without a word."""
    if facts.threads <= 32 * entry.num_warps:
        yield "no warps of their own for copies and products"
    yield from _local_memory(facts)


def _store_of(entry: Entry) -> str:
    """The instruction by which results leave a descriptor kernel."""
    if kernel_of(entry) == "scatter_linear":
        return "STG.128"  # into memory of other ranks, which no descriptor of ours describes
    return "UTMAREDG" if _adds(entry) else "UTMASTG"


def _adds(entry: Entry) -> bool:
    """Whether the copy engine adds results to what is there."""
    return bool(entry.constants.get("REDUCE") or getattr(entry.constants.get("P"), "adds", False))


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


NAMES = ("step", "edge")  # of stretches
TOLERANCE = 0.03
LEAST_CHANGE = {"step": 1.0, "edge": 16.0}  # cycles: where other warps hide it, an edge is next to nothing
LEAST = 0.01  # of a stretch: causes of less are not kept


def as_text(stretch: Stretch) -> str:
    """ "5950 cycles, 4 serial loads; stores 2410; barrier 800": one text, so that an entry has a line."""
    serial = f", {stretch.serial_loads} serial loads" if stretch.serial_loads else ""
    cycles = round(stretch.cycles)
    large = [
        f"{cause} {spent:.0f}" for cause, spent in stretch.waits.items() if round(spent) >= LEAST * cycles
    ]
    return "; ".join([f"{cycles} cycles{serial}", *large])


def from_text(text: str) -> Stretch:
    """Return what `as_text` was given, rounded; ValueError for anything else."""
    from tpkernels.gate.clock.cost import Stretch  # imports Triton, which those who read rules may do without

    head, *large = text.split("; ")
    cycles, _, serial = head.partition(" cycles")
    waits = dict(one.rsplit(" ", 1) for one in large)
    loads = serial.removeprefix(", ").removesuffix(" serial loads")
    return Stretch(float(cycles), {cause: float(spent) for cause, spent in waits.items()}, int(loads or 0))


def slower(before: Mapping[str, Stretch], cost: Cost) -> Iterator[str]:
    """Each stretch that takes longer, and why: "step 1,040 -> 1,460 cycles: waits for copies"."""
    for name, was, now in _pairs(before, cost):
        if now.cycles - was.cycles > max(TOLERANCE * was.cycles, LEAST_CHANGE[name]):
            yield f"{_change(name, was, now)}: {_cause(was, now)}"


def faster(before: Mapping[str, Stretch], cost: Cost) -> Iterator[str]:
    """Each stretch that takes less, as "step 1,040 -> 900 cycles"."""
    for name, was, now in _pairs(before, cost):
        if was.cycles - now.cycles > max(TOLERANCE * was.cycles, LEAST_CHANGE[name]):
            yield _change(name, was, now)


def cost_as_texts(cost: Cost) -> dict[str, str]:
    """A text for each stretch, and one for the rest: rounded, and without small causes."""
    rest = f"ideal {cost.ideal:g}, start {cost.start:.0f}, resident {cost.resident}, bytes {cost.bytes}"
    ends = {"launch": f"{rest}, guessed {cost.guessed}, program {cost.program or '-'}"}
    return {name: as_text(stretch) for name, stretch in stretches(cost).items()} | ends


def cost_from_texts(texts: Mapping[str, Any]) -> Cost:
    """Return what `cost_as_texts` was given, rounded; KeyError or ValueError for anything else."""
    from tpkernels.gate.clock.cost import Cost

    step = from_text(texts["step"]) if "step" in texts else None
    rest = dict(one.split() for one in texts["launch"].split(", "))
    return Cost(
        step,
        from_text(texts["edge"]),
        ideal=float(rest["ideal"]),
        start=float(rest["start"]),
        resident=int(rest["resident"]),
        bytes=int(rest["bytes"]),
        guessed=int(rest["guessed"]),
        program=rest["program"].strip("-"),
    )


def kept(cost: Cost) -> Cost:
    """What the table keeps of a cost."""
    return cost_from_texts(cost_as_texts(cost))


def stretches(cost: Cost) -> dict[str, Stretch]:
    """By the names that failures call them."""
    return ({} if cost.step is None else {"step": cost.step}) | {"edge": cost.edge}


def _pairs(before: Mapping[str, Stretch], cost: Cost) -> Iterator[tuple[str, Stretch, Stretch]]:
    after = stretches(cost)
    for name, was in before.items():
        if name in after:  # else the kernel has no main loop any more, which its instructions tell
            yield name, was, after[name]


def _change(name: str, was: Stretch, now: Stretch) -> str:
    return f"{name} {was.cycles:,.0f} -> {now.cycles:,.0f} cycles"


def _cause(was: Stretch, now: Stretch) -> str:
    """Why more cycles are spent than before."""
    if now.serial_loads > max(was.serial_loads, 1):
        return f"{now.serial_loads} loads awaited one after the other"
    grown = {cause: spent - was.waits.get(cause, 0.0) for cause, spent in now.waits.items()}
    most = max(grown, key=grown.__getitem__, default="")
    if most and grown[most] > (now.cycles - was.cycles) / 4:
        return f"waits for {most.removeprefix('scoreboard: ')}"
    return "more instructions"


REGISTER_UNIT = 8
CEILINGS = ("exposed_waits", "serial_stores")
KEPT = ("products_during_stores", "loads_during_stores")  # what must not be lost


@dataclass(frozen=True, slots=True)
class Budget:
    registers: int
    shared: int
    spills: int = 0
    instructions: Mapping[str, int] = field(default_factory=dict)  # absent is zero
    # see `epilogue`; None: not known, and not compared
    exposed_waits: int | None = None
    serial_stores: int | None = None
    products_during_stores: bool | None = None
    loads_during_stores: bool | None = None
    cost: Cost | None = None  # as `kept` rounds it; None: not clocked

    @staticmethod
    def of(facts: Facts, cost: Cost | None = None) -> Budget:
        """What the facts need, and no more."""
        registers = -(-facts.registers // REGISTER_UNIT) * REGISTER_UNIT
        epilogue = {name: getattr(facts, name) for name in (*CEILINGS, *KEPT)}
        known = kept(cost) if cost else None
        return Budget(registers, facts.shared, facts.spills, facts.instructions, **epilogue, cost=known)

    def as_json(self) -> dict[str, int | str]:
        """Counts of instructions as one text and the cost as three, so that an entry has a line."""
        counts = ", ".join(f"{name} {count}" for name, count in sorted(self.instructions.items()))
        numbers: dict[str, int | str] = {"registers": self.registers, "shared": self.shared}
        epilogue = {name: getattr(self, name) for name in CEILINGS if getattr(self, name) is not None}
        kept = {name: True for name in KEPT if getattr(self, name)}
        spills = {"spills": self.spills} if self.spills else {}
        clocked = cost_as_texts(self.cost) if self.cost else {}
        return numbers | spills | epilogue | kept | clocked | {"instructions": counts}

    @staticmethod
    def from_json(row: dict[str, Any]) -> Budget:
        """What `as_json` gave; KeyError, TypeError or ValueError for anything else."""
        counts = (text.split() for text in row["instructions"].split(", ") if text)
        cost = cost_from_texts(row) if "edge" in row else None
        rest = {name: value for name, value in row.items() if name not in (*NAMES, "launch")}
        instructions = {name: int(count) for name, count in counts}
        return Budget(**rest | {"instructions": instructions, "cost": cost})

    @property
    def cycles(self) -> Mapping[str, Stretch]:
        """Of "step" and "edge", where they are known."""
        return stretches(self.cost) if self.cost else {}

    def excesses(self, facts: Facts) -> Iterator[str]:
        """Each number that is over its budget, as "registers 191 > 168"."""
        for name in ("registers", "shared", "spills", *CEILINGS):
            used, ceiling = getattr(facts, name), getattr(self, name)
            if None not in (used, ceiling) and used > ceiling:
                yield f"{name} {used:,} > {ceiling:,}"
        for name in KEPT:
            if getattr(self, name) and getattr(facts, name) is False:
                yield f"{name} no longer"

    def changes(self, facts: Facts) -> Iterator[str]:
        """Each count of instructions that is another, as "HGMMA 8, was 4"."""
        for name in sorted(self.instructions.keys() | facts.instructions.keys()):
            count, was = facts.count(name), self.instructions.get(name, 0)
            if count != was:
                yield f"{name} {count:,}, was {was:,}"


@dataclass(slots=True)
class Budgets:
    """The budgets of one minor version of Triton, with where they come from."""

    provenance: dict[str, str] = field(default_factory=dict)
    rows: dict[str, dict[str, Budget]] = field(default_factory=dict)  # architecture -> entry -> budget

    def of(self, architecture: str, entry: str) -> Budget | None:
        return self.rows.get(architecture, {}).get(entry)

    def hold(self, architecture: str) -> bool:
        """Whether an architecture's entries are held to rows: where none are listed, all are."""
        listed = self.provenance.get("architectures")
        return listed is None or architecture in listed.split()

    def keys(self) -> set[tuple[str, str]]:
        """(architecture, entry) of every row."""
        return {(architecture, name) for architecture, entries in self.rows.items() for name in entries}


def minor_version(triton_version: str) -> str:
    """ "3.7" of "3.7.1"."""
    return ".".join(triton_version.split(".")[:2])


def read(path: Path = TABLE) -> dict[str, Budgets]:
    """The whole table: minor version of Triton -> budgets. ValueError if it is damaged."""
    if not path.exists():
        return {}
    try:
        return _parsed(parsed(read_text(path)))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is no table of budgets ({error!r}): restore it") from error


def _parsed(table: Any) -> dict[str, Budgets]:
    return {
        minor: Budgets(
            part["provenance"],
            {
                architecture: {name: Budget.from_json(row) for name, row in entries.items()}
                for architecture, entries in part["rows"].items()
            },
        )
        for minor, part in table.items()
    }


def updated(
    old: Budgets | None,
    new: Mapping[tuple[str, str], Budget],
    current: Collection[tuple[str, str]],
    provenance: dict[str, str],
) -> Budgets:
    """The old budgets with the new in place of theirs, without rows that are no longer current.

    A table begun for some architectures lists them: only their rows may not be lost.

    new, current: by (architecture, name of the entry)
    """
    flat = {
        (architecture, name): budget
        for architecture, entries in (old.rows if old else {}).items()
        for name, budget in entries.items()
        if (architecture, name) in current
    }
    flat |= new
    rows: dict[str, dict[str, Budget]] = {}
    for (architecture, name), budget in flat.items():
        rows.setdefault(architecture, {})[name] = budget
    every, begun = {gpu for gpu, _ in current}, {gpu for gpu, _ in new}
    held = {gpu for gpu in every if gpu in begun or (old and old.hold(gpu))}
    listed = {} if held == every else {"architectures": " ".join(sorted(held))}
    return Budgets(provenance | listed, rows)


def write(table: Mapping[str, Budgets], path: Path = TABLE) -> None:
    """In a fixed order and one line an entry, so that a change of the table reads well in review."""
    plain = {
        minor: {
            "provenance": budgets.provenance,
            "rows": {
                architecture: {name: budget.as_json() for name, budget in entries.items()}
                for architecture, entries in budgets.rows.items()
            },
        }
        for minor, budgets in table.items()
    }
    text = json.dumps(plain, indent=1, sort_keys=True)
    innermost = re.compile(r"\{[^{}]*\}")
    path.write_text(innermost.sub(lambda found: " ".join(found[0].split()), text) + "\n", encoding="utf-8")
