"""What a kernel costs in cycles: a step of depth, a tile beyond its steps, a launch beyond its tiles.

A few tiles of a few steps are run on one SM, then more tiles, then deeper ones. The differences are costs of
the kernel, not of a shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from math import lcm
from operator import attrgetter
from typing import Any

from tpkernels.gate.clock.effects import ClockFault
from tpkernels.gate.clock.launch import Built
from tpkernels.gate.clock.processor import Run, run
from tpkernels.gate.clock.resources import FLOPS
from tpkernels.gate.clock.semantics import translate
from tpkernels.gate.clock.workload import Product, Workload

_cycles = attrgetter("cycles")  # of a run
SHORT, LONG = 20, 40  # steps of a tile: buffers that an epilogue has filled must run dry first


class WrongAmount(ClockFault):
    """The machine code moves or multiplies something else than the launch says."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of a tile."""

    cycles: float
    waits: Mapping[str, float]  # cause -> cycles of the warps that multiply (else: of all), largest first
    serial_loads: int  # loads that were each awaited before the next was issued


@dataclass(frozen=True, slots=True)
class Cost:
    step: Stretch | None  # of depth, of a tile; None: the kernel has no steps of products
    edge: Stretch  # of a tile beyond its steps; without products: of a block
    ideal: float  # cycles of a step that the products alone take; 0 without products
    start: float  # cycles of a launch beyond its tiles
    resident: int  # blocks on an SM
    bytes: int  # from and to global memory: of a tile beyond its steps, or of a block
    guessed: int  # branches on data
    program: str = ""  # a hash of all that the clock read

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(value: Any) -> Cost:
        """What `as_json` gave; TypeError for anything else."""
        if not isinstance(value, dict) or set(value) != {field.name for field in fields(Cost)}:
            raise TypeError(f"expected the fields of Cost, got {value!r}")
        step = None if value["step"] is None else Stretch(**value["step"])
        return Cost(**value | {"step": step, "edge": Stretch(**value["edge"])})


def cost_of(built: Built, workload: Workload) -> Cost:
    """ClockFault where the machine code does not do what the workload says, or never ends."""
    program = translate(built.code)

    def ran(tiles: int, steps: int) -> Run:
        return run(program, workload.on_one(built, tiles, steps))

    resident = workload.on_one(built, 64 * workload.unit, SHORT).resident
    together = lcm(resident, workload.unit)
    few = -(-2 * resident // together) * together
    more = few + together
    if workload.product is None:
        return _of_blocks(ran(few, 0), ran(more, 0), few, more, resident)
    short, long = (steps // workload.product.pairs for steps in (SHORT, LONG))
    small, wide, deep = ran(few, short), ran(more, short), ran(more, long)
    deeper = more * (long - short)

    def step(amount: Callable[[Run], float]) -> float:
        return (amount(deep) - amount(wide)) / deeper

    def edge(amount: Callable[[Run], float]) -> float:
        return (amount(wide) - amount(small)) / (more - few) - short * step(amount)

    _check(workload, step, built)
    start = small.cycles - few * (edge(_cycles) + short * step(_cycles))
    return Cost(
        _stretch(step, deep, resident),
        _stretch(edge, deep, resident),
        _ideal(workload.product, step(lambda one: one.tensor)),
        max(0.0, start),
        resident,
        round(edge(_bytes)),
        deep.guessed,
    )


def _of_blocks(small: Run, wide: Run, few: int, more: int, resident: int) -> Cost:
    def edge(amount: Callable[[Run], float]) -> float:
        if small.instructions == wide.instructions:  # the grid has no more blocks than these
            return amount(wide) / wide.blocks
        return (amount(wide) - amount(small)) / (more - few)

    start = max(0.0, small.cycles - few * edge(_cycles))
    moved = round(edge(_bytes))
    return Cost(None, _stretch(edge, wide, resident), 0.0, start, resident, moved, wide.guessed)


def _stretch(part: Callable[[Callable[[Run], float]], float], one: Run, resident: int) -> Stretch:
    """part: takes this part's share of an amount of a run"""
    warps = one.multiply or frozenset(range(len(one.stalls)))
    causes = {cause for warp in warps for cause in one.stalls[warp]}

    def spent(cause: str) -> float:
        return (
            part(lambda run: sum(run.stalls[warp].get(cause, 0.0) for warp in warps)) / len(warps) / resident
        )

    waits = {cause: cycles for cause in causes if (cycles := round(spent(cause), 1)) >= 1.0}
    serial = part(lambda run: max(run.serial_loads.get(warp, 0) for warp in warps))
    ordered = dict(sorted(waits.items(), key=lambda item: (-item[1], item[0])))
    return Stretch(part(_cycles), ordered, max(0, round(serial)))


def _check(workload: Workload, step: Callable[[Callable[[Run], float]], float], built: Built) -> None:
    product = workload.product
    assert product is not None, "only called for one"
    tensor, fetched, copied = (
        step(amount) for amount in (lambda one: one.tensor, lambda one: one.fetched, lambda one: one.copied)
    )
    due = product.flops / FLOPS * (product.itemsize / 2)
    if tensor and abs(tensor - due) > 1e-3 * due:
        raise WrongAmount(
            f"{workload.name}: products of a step take {tensor:,.1f} cycles, its shape says {due:,.1f}"
        )
    copies = any(one.opcode == "UTMALDG" for one in built.code.instructions)
    most = product.bytes + product.beside + 0.5
    if fetched < product.bytes - 0.5 or (copies and (fetched > most or abs(copied - product.bytes) > 0.5)):
        beside = f", of which {copied:,.1f} by copies" if copies else ""
        raise WrongAmount(
            f"{workload.name}: a step loads {fetched:,.1f} bytes{beside}; its operands have {product.bytes:,}"
            + (f", and what lies beside at most {product.beside:,}" if product.beside else "")
        )


def _ideal(product: Product, tensor: float) -> float:
    """Without tensor cores, an SM multiplies and adds 128 numbers a cycle."""
    return tensor or product.flops / 256


def _bytes(one: Run) -> float:
    return one.fetched + one.stored
