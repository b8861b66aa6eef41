"""What differs between two compilations of a kernel, what got worse, and why.

One comparison for budgets, for two Tritons and for two revisions. Each change is a sentence that begins with
its cause. Effects that cancel are none: fewer registers that make room for no further block, a shallower
pipeline in twice the blocks, a loop that is unrolled (it is compared by its work).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tpkernels.gate import loops
from tpkernels.gate.ahead_of_time import Facts
from tpkernels.gate.disassembly import GLOBAL, WIDTHS
from tpkernels.gate.occupancy import blocks_by_limit, occupancy

Severity = Literal["better", "note", "worse", "severe"]
SEVERITIES: tuple[Severity, ...] = ("better", "note", "worse", "severe")  # in order
REGISTER_UNIT = 8  # in which the hardware hands out registers
# the tensor cores' instructions, slower ones first
PRODUCTS = ("v_mfma", "HMMA", "QMMA", "HGMMA", "QGMMA", "UTCHMMA", "UTCQMMA")
GROWN = 0.1  # of a loop's instructions, or of one kind: more is worse
NOTED = 0.02
MUCH = 0.25  # of what threads exchange, or of the waits for loads
LEAST = 16  # instructions of a kind outside the loops
FEWER_LOADS = 0.2  # of the bytes that an SM has in flight
EXCHANGED = 0.05  # more of the instructions exchange data
OTHERS = ("stack", "threads", "blocks", "loops", "tile_loops", "load_bytes", "load_waits")
# kinds by which data changes places between threads
EXCHANGES = ("shared stores", "shared loads", "shuffles", "barriers")
COSTLY = ("special functions", "conversions")  # with a fraction of the throughput of others


@dataclass(frozen=True, slots=True)
class Change:
    what: str  # "occupancy": one word for all kernels
    text: str  # "64 to 72 registers: occupancy 50 to 43 %"
    severity: Severity

    def __str__(self) -> str:
        return f"better: {self.text}" if self.severity == "better" else self.text


def changes(before: Facts, after: Facts, architecture: str) -> list[Change]:
    """The worst first; () only if nothing differs that a budget holds."""
    found = [
        *_products(before, after),
        *_spills(before, after),
        *_pipeline(before, after),
        *_accesses(before, after),
    ]
    found += _awaited(before, after, at_least(found, "worse"))
    found += _occupancy(before, after, architecture)
    found += _loads(before, after)
    found += _loop(before, after)
    found += _rest(before, after)
    if not found and (others := ", ".join(_counts(before, after))):
        found.append(Change("instructions", f"other instructions: {others}", "note"))
    return sorted(found, key=lambda change: -SEVERITIES.index(change.severity))


def at_least(found: Iterable[Change], severity: Severity) -> list[Change]:
    """Changes that are so bad, or worse."""
    return [one for one in found if SEVERITIES.index(one.severity) >= SEVERITIES.index(severity)]


def _products(before: Facts, after: Facts) -> Iterator[Change]:
    was, now = ([name for name in PRODUCTS if facts.count(name)] for facts in (before, after))
    if was and now != was:
        instead = " and ".join(f"{after.count(name)} {name}" for name in now) or "no tensor core"
        gone = " and ".join(f"{before.count(name)} {name}" for name in was)
        fastest = [PRODUCTS.index(names[-1]) if names else -1 for names in (was, now)]
        slower = fastest[1] < fastest[0] or (fastest[1] == fastest[0] and now[0] not in was)
        yield Change("products", f"{instead} instead of {gone}", "severe" if slower else "better")
    elif now and not was:
        yield Change("products", f"tensor cores are used: {after.count(now[-1])} {now[-1]}", "better")


def _awaited(before: Facts, after: Facts, causes: Sequence[Change]) -> Iterator[Change]:
    """How many batches of products are in flight: with other causes it is their consequence, and no worse."""
    if not any(map(after.count, PRODUCTS)):
        return
    if after.in_flight < before.in_flight:
        text = f"products are awaited {'sooner' if after.in_flight else 'one by one'}: "
        text += f"batches in flight {before.in_flight} to {after.in_flight}"
        severity: Severity = "worse" if after.in_flight else "severe"
        if causes and not at_least(causes, "severe"):
            severity = "worse"
        yield Change("products", text, severity)
    elif after.in_flight > before.in_flight:
        yield Change("products", f"batches in flight {before.in_flight} to {after.in_flight}", "better")


def _spills(before: Facts, after: Facts) -> Iterator[Change]:
    was, now = (facts.loop.get("spills", 0) if facts.loops else 0 for facts in (before, after))
    if now > was:
        yield Change(
            "spills", f"registers spill in the inner loop: {_pair(was, now)} accesses a turn", "severe"
        )
    elif after.spills > before.spills:
        yield Change("spills", f"registers spill: {_pair(before.spills, after.spills)} accesses", "worse")
    elif after.spills < before.spills:
        yield Change("spills", f"fewer spills: {_pair(before.spills, after.spills)} accesses", "better")


def _pipeline(before: Facts, after: Facts) -> Iterator[Change]:
    was, now = before.pipeline, after.pipeline
    if was == now:
        return
    if not was or not now:
        lost = f"no operand is copied ahead: the pipeline of {max(was, default=0)} is lost"
        text = lost if was else f"operands are copied ahead: a pipeline of {max(now)}"
        yield Change("pipeline", text, "severe" if was else "better")
        return
    if len(was) == len(now):
        text = f"a pipeline of {' and '.join(_each(was))} is one of {' and '.join(_each(now))}"
    else:
        text = f"{len(was)} operands were copied ahead, {len(now)} are"
    blocks = before.blocks or 1, after.blocks or 1
    in_all = sum(was) * blocks[0], sum(now) * blocks[1]
    if sum(now) < sum(was) and in_all[1] >= in_all[0]:
        yield Change("pipeline", f"{text}, in {blocks[1]} blocks an SM instead of {blocks[0]}", "note")
    else:
        severity: Severity = "severe" if len(now) < len(was) else "worse"
        yield Change("pipeline", text, severity if sum(now) < sum(was) else "better")


def _each(depths: tuple[int, ...]) -> list[str]:
    return [*dict.fromkeys(map(str, depths))]


def _accesses(before: Facts, after: Facts) -> Iterator[Change]:
    if before.count("UTMALDG") and not after.count("UTMALDG"):
        yield Change("loads", "nothing is copied by TMA: UTMALDG is gone", "severe")
    for family, name in zip(GLOBAL, ("load", "store", "copy"), strict=True):
        was, now = _widths(before, family), _widths(after, family)
        if not was or not now:
            continue
        texts = [" and ".join(f"{count} x {size}" for size, count in one.items()) for one in (was, now)]
        text = f"{texts[1]} bytes instead of {texts[0]}"
        if _is_narrower(was, now):
            yield Change(f"{name} width", f"a {name} is narrower: {text}", "worse")
        elif _is_narrower(now, was):
            yield Change(f"{name} width", f"a {name} is wider: {text}", "better")


def _is_narrower(was: Mapping[int, int], now: Mapping[int, int]) -> bool:
    """Whether fewer bytes go by accesses of some width or wider, but not fewer in all."""

    def moved(accesses: Mapping[int, int], least: int = 1) -> int:
        return sum(size * count for size, count in accesses.items() if size >= least)

    return moved(now) >= 0.9 * moved(was) and any(moved(now, size) < 0.9 * moved(was, size) for size in was)


def _widths(facts: Facts, family: str) -> dict[int, int]:
    """Bytes -> how many accesses, widest first."""
    rest = facts.count(family)
    found: dict[int, int] = {}
    for word, size in WIDTHS.items():
        if count := facts.count(f"{family}.{word}"):
            found[size] = found.get(size, 0) + count
            rest -= count
    if rest:
        found[4] = rest
    return dict(sorted(found.items(), reverse=True))


def _occupancy(before: Facts, after: Facts, architecture: str) -> Iterator[Change]:
    was, now = (occupancy(architecture, one.blocks, one.threads) for one in (before, after))
    if was is not None and now is not None and was != now:
        fewer = after if now < was else before
        limits = blocks_by_limit(architecture, fewer.registers, fewer.threads, fewer.shared)
        binding = next((limit for limit, count in limits.items() if count == fewer.blocks), "")
        pair = {
            "registers": (before.registers, after.registers),
            "bytes of shared memory": (before.shared, after.shared),
        }.get(binding, (0, 0))
        if pair[0] == pair[1]:
            pair, binding = (before.threads, after.threads), "threads a block"
        text = f"{_pair(*pair)} {binding}: occupancy {100 * was:.0f} to {100 * now:.0f} %"
        yield Change("occupancy", text, "worse" if now < was else "better")
        return
    if _rounded(after.registers) > _rounded(before.registers):
        yield Change("registers", f"{before.registers} to {after.registers} registers{_same(after)}", "note")
    if after.shared > before.shared:
        text = f"{_pair(before.shared, after.shared)} bytes of shared memory{_same(after)}"
        yield Change("shared", text, "note")


def _same(facts: Facts) -> str:
    return "" if facts.blocks is None else f", still {facts.blocks} block{'s' * (facts.blocks != 1)} an SM"


def _rounded(registers: int) -> int:
    return -(-registers // REGISTER_UNIT) * REGISTER_UNIT


def _loads(before: Facts, after: Facts) -> Iterator[Change]:
    """Plain loads: how much of them is in flight, and how often they are awaited."""
    was, now = (one.load_bytes * one.threads * (one.blocks or 1) for one in (before, after))
    text = f"loads in flight {before.load_bytes} to {after.load_bytes} bytes a thread"
    if before.loops == after.loops and was and now:
        if now < (1 - FEWER_LOADS) * was and after.load_bytes < before.load_bytes:
            # beside what is copied ahead they are an epilogue's, and registers that they leave free help it
            yield Change("loads in flight", text, "note" if after.pipeline else "worse")
        elif now > was / (1 - FEWER_LOADS) and after.load_bytes > before.load_bytes:
            yield Change("loads in flight", text, "better")
    turn = " one after the other"
    waits = before.load_waits, float(after.load_waits)
    if before.loops and after.loops and before.loop.get(loops.WAITS):
        turn = " a turn of the loop"
        waits = _counted(loops.WAITS, before, after, _scale(before, after))
    if abs(waits[1] - waits[0]) > NOTED * waits[0]:
        text = f"loads are awaited {waits[1]:.3g} times{turn} instead of {waits[0]}"
        much = waits[1] > (1 + MUCH) * waits[0] and waits[0] and now <= was
        yield Change("load waits", text, "better" if waits[1] < waits[0] else "worse" if much else "note")


def _scale(before: Facts, after: Facts) -> float:
    """By how much a turn did more work before: then the loop is unrolled less."""
    was, now = before.loop.get(loops.WORK, 0), after.loop.get(loops.WORK, 0)
    return was / now if was and now and after.loops else 1.0


def _loop(before: Facts, after: Facts) -> Iterator[Change]:
    if not before.loop or not after.loop or bool(before.loops) != bool(after.loops):
        if before.loop and after.loop:
            yield Change("loop", "the loop is unrolled" if before.loops else "there is a loop", "note")
        return
    if {*filter(before.count, PRODUCTS)} != {*filter(after.count, PRODUCTS)}:
        return  # its turns do other work, which is told
    where = "the inner loop" if after.loops else "the kernel"
    scale = _scale(before, after)
    grown = {kind: pair for kind in loops.KINDS if _has_grown(pair := _counted(kind, before, after, scale))}
    exchanges = [kind for kind in EXCHANGES if kind in grown]
    if exchanges:
        pairs = [_counted(kind, before, after, scale) for kind in EXCHANGES[:3]]
        moved = [sum(pair) for pair in zip(*pairs, strict=True)]
        barriers = _counted("barriers", before, after, scale)
        part = (moved[1] - moved[0]) / before.loop[loops.ALL]
        much = (moved[1] > (1 + MUCH) * moved[0] and part > EXCHANGED) or barriers[1] >= max(
            2 * barriers[0], barriers[0] + 2
        )
        what = "a round trip through shared memory" if {*exchanges} >= {*EXCHANGES[:2]} else "more exchange"
        text = f"{what} between threads in {where}: {_told(grown, exchanges)}"
        yield Change("exchanges", text, "worse" if much else "note")
    was, now = _counted(loops.ALL, before, after, scale)
    part = now / was - 1
    costly = [kind for kind in COSTLY if kind in grown]
    rest = [kind for kind in grown if kind not in EXCHANGES and kind != "spills"]
    if part > GROWN or costly:
        told = _told(grown, rest) or "of all kinds"
        text = f"{where} grew by {100 * part:.0f} %, {was:.0f} to {now:.0f} instructions: {told}"
        yield Change("loop", text, "worse")
    elif part > NOTED and not exchanges:
        text = f"{where} grew by {100 * part:.0f} %, {was:.0f} to {now:.0f} instructions"
        yield Change("loop", text, "note")
    elif part < -NOTED:
        text = f"{where} has {-100 * part:.0f} % fewer instructions: {was:.0f} to {now:.0f}"
        yield Change("loop", text, "better")


def _rest(before: Facts, after: Facts) -> Iterator[Change]:
    """What lies outside the inner loops, where both have some: mostly an epilogue."""
    if not before.loops or not after.loops:
        return
    if before.tile_loops == 1 and after.tile_loops == 2:
        text = (
            "the loop over tiles is no longer one with that over depth: copies wait for the last tile's end"
        )
        yield Change("tiles", text, "worse")
    elif before.tile_loops == 2 and after.tile_loops == 1:
        yield Change("tiles", "the loop over tiles is one with that over depth", "better")
    threads = after.threads / before.threads if before.threads and after.threads else 1.0
    pairs = {kind: (before.rest.get(kind, 0), after.rest.get(kind, 0) * threads) for kind in loops.REST}
    if grown := {kind: pair for kind, pair in pairs.items() if pair[1] > (1 + MUCH) * pair[0] + LEAST}:
        text = f"what lies outside the inner loop grew: {_told(grown, grown)}"
        yield Change("epilogue", text, "worse")
        return
    was, now = (one.count("all") - one.loop.get(loops.ALL, 0) for one in (before, after))
    products = [{*filter(one.count, PRODUCTS)} for one in (before, after)]
    others = before.pipeline != after.pipeline or products[0] != products[1]  # so are copies ahead of it
    if others or after.spills > before.spills or not 0 < (1 + MUCH) * was < now * threads:
        return
    names = {name for name in after.instructions if "." not in name and name != "all"}
    counts = {name: (before.count(name), float(after.count(name))) for name in names}
    most = {name: pair for name, pair in counts.items() if pair[1] > pair[0]}
    text = f"what lies outside the inner loop grew, {_pair(was, now)} instructions: {_told(most, most)}"
    yield Change("epilogue", text, "worse")


def _counted(kind: str, before: Facts, after: Facts, scale: float) -> tuple[int, float]:
    return before.loop.get(kind, 0), after.loop.get(kind, 0) * scale


def _has_grown(pair: tuple[int, float]) -> bool:
    return pair[1] > (1 + GROWN) * pair[0] + 0.5


def _told(grown: Mapping[str, tuple[int, float]], kinds: Iterable[str]) -> str:
    """Those that grew most."""
    most = sorted(kinds, key=lambda kind: grown[kind][0] - grown[kind][1])
    return ", ".join(f"{kind} {grown[kind][0]} to {grown[kind][1]:,.0f}" for kind in most[:3])


def _counts(before: Facts, after: Facts) -> Iterator[str]:
    """Each count of instructions that is another, as "HGMMA 8, was 4"."""
    counted = " in the loop" if before.loops or after.loops else " in the kernel"
    for was, now, where in (
        (before.instructions, after.instructions, ""),
        (before.loop, after.loop, counted),
        (before.rest, after.rest, " outside"),
        *(({name: getattr(before, name) or 0}, {name: getattr(after, name) or 0}, "") for name in OTHERS),
    ):
        for name in sorted(was.keys() | now.keys()):
            if was.get(name, 0) != now.get(name, 0):
                yield f"{name}{where} {now.get(name, 0):,}, was {was.get(name, 0):,}"


def _pair(was: int, now: int) -> str:
    return f"{was:,} to {now:,}"
