"""From cycles of one SM to the time of a launch: waves, the clock under power, traffic to memory.

A model: nothing here is measured. `ERROR` says how far it was from published timings.
"""

from __future__ import annotations

from dataclasses import dataclass

from tpkernels.gate.clock.cost import Cost
from tpkernels.gate.clock.effects import ClockFault
from tpkernels.gate.clock.resources import FETCH
from tpkernels.gate.clock.workload import Workload

# Root mean square of the errors of what no constant was fitted to, see docs/clock.md; a test compares.
ERROR = 0.08
PEAK = 989.4  # TFLOP/s of an H100 SXM with 16-bit operands, by its data sheet


class TooFast(ClockFault):
    """A time in which memory could not move the bytes of the launch."""


@dataclass(frozen=True, slots=True)
class Board:
    """An H100 SXM, as far as it is known."""

    processors: int = 132
    boost: float = 1.98e9  # hertz: nvidia-smi -q -d CLOCK
    full: float = 1.30e9  # that power allows with every tensor core busy: fitted, and each board's own
    cube: float = 1 / 3  # while power limits, clock ~ busy ** -cube: power ~ f V^2, V ~ f
    sheet: float = 3.35e12  # bytes a second that memory moves at most: data sheet
    memory: float = 0.9 * 3.35e12  # and what copies reach of it
    overhead: float = 3e-6  # seconds of a launch: assumed

    def clock(self, busy: float) -> float:
        """Hertz at this busy share of the tensor cores."""
        return min(self.boost, self.full * float(max(busy, 0.05) ** -self.cube))


@dataclass(frozen=True, slots=True)
class KernelPrediction:
    """Of a model; seconds and TFLOP/s are off by `error` as a rule."""

    seconds: float
    tflops: float  # 0 without products
    of_peak: float  # for operands of this size
    busy: float  # share of the time in which tensor cores work
    clock: float  # hertz
    waves: float  # tiles over tiles that run at once
    idle: float  # share of the time in which SMs have no tile left
    memory: float  # share of the time that traffic to memory alone would take
    bound: str
    error: float = ERROR


def predict(cost: Cost, workload: Workload, board: Board | None = None) -> KernelPrediction:
    """What a launch takes; TooFast where memory cannot move its bytes in that time."""
    board = board or Board()
    share = workload.tiles / board.processors
    rounds = -(-workload.tiles // board.processors)  # on the SM with the most tiles
    if workload.persistent:  # fixed shares: each block as many as the first
        blocks = board.processors * cost.resident
        rounds = min(-(-workload.tiles // blocks) * cost.resident, workload.tiles)
    product, steps = workload.product, steps_of(workload)
    tile = (cost.step.cycles if cost.step else 0.0) * steps + cost.edge.cycles
    if product:  # L2 serves an SM so many bytes a cycle, whether they are read or written
        tile = max(tile, (product.bytes * steps + cost.bytes) / FETCH)
    total = cost.start + rounds * tile
    busy = cost.ideal * steps * share / total
    clock = board.clock(busy)
    moved = _traffic(workload, cost, board)
    memory = moved / board.memory
    seconds = max(total / clock, memory) + board.overhead
    _require_time_for_bytes(workload, seconds, moved, board)
    tflops = (product.flops if product else 0) * steps * workload.tiles / seconds / 1e12
    peak = 2 * PEAK if product and product.itemsize == 1 else PEAK
    idle = 1 - share / rounds
    return KernelPrediction(
        seconds,
        tflops,
        tflops / peak,
        busy,
        clock,
        share / cost.resident,
        idle,
        memory / seconds,
        _bound(cost, steps, tile, idle, memory / seconds),
    )


def _require_time_for_bytes(workload: Workload, seconds: float, counted: float, board: Board) -> None:
    """However it was counted: a time below the bytes of the launch is a mistake of the clock."""
    least = workload.least / board.sheet
    if seconds < least:
        raise TooFast(
            f"{workload.name}: {seconds * 1e6:,.1f} us are too few for {workload.least:,} bytes, which take "
            f"{least * 1e6:,.1f} us at least; the clock has counted {counted:,.0f} bytes"
        )


def steps_of(workload: Workload) -> int:
    """Steps of depth of a tile."""
    return -(-workload.shape[2] // workload.product.depth) if workload.product else 0


def _bound(cost: Cost, steps: int, tile: float, idle: float, memory: float) -> str:
    """What costs most beyond the products.

    tile: its cycles
    """
    if memory > 0.9:
        return "memory"
    if cost.step is None:
        return next(iter(cost.edge.waits), "instructions")
    lost = {
        "main loop": (cost.step.cycles - cost.ideal) * steps,
        "edge of a tile": tile - cost.step.cycles * steps,
        "last wave": tile * idle / max(1e-9, 1 - idle),
        "start": cost.start,
    }
    most = max(lost, key=lost.__getitem__)
    return most if lost[most] > 0.05 * cost.ideal * steps else "tensor cores"


def _traffic(workload: Workload, cost: Cost, board: Board) -> float:
    """Bytes to and from memory: each wave reads the rows and columns of its tiles once, L2 holds them."""
    moved = workload.tiles * cost.bytes
    product = workload.product
    if product is None:  # what all blocks read lies in L2
        return min(moved, workload.traffic)
    rows, cols, depth = workload.shape
    down, across = -(-rows // product.rows), -(-cols // product.cols)
    running = min(board.processors * cost.resident, workload.tiles)
    tall = min(workload.group, down)
    wide = min(across, -(-running // tall))
    depth_bytes = depth * product.itemsize * product.pairs
    wave = (tall * product.rows + wide * product.cols * product.weights) * depth_bytes
    once = (rows + cols * product.weights) * depth_bytes
    return max(once, workload.tiles / running * wave) + moved
