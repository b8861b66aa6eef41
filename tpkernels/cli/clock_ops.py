"""`python -m tpkernels clock column_linear ...`: predicts a tensor-parallel call's time in each way.

Naive is `F.linear` after a blocking collective; c10d, symmetric and rounds-N are ours; decomposed has the
schedule of other libraries' kernels. Needs no GPU.


For the name of a kernel it compiles, clocks and predicts the kernel at a shape.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.streams import MachineError
from bench.streams.prediction import Predicted, predict
from bench.streams.times import COMPUTE, COPIES, GRAPH, HOST, NCCL, TRANSFER, Node, Ran
from tpkernels.cli import add_number, bad_use_if, drawn_into, write_json, written_to
from tpkernels.dispatch.workload import FromCatalog, of_entry
from tpkernels.gate.ahead_of_time import CLOCKED, CompileJob, Entry, Facts, facts_or_error
from tpkernels.gate.clock.cost import SHORT, Cost, Stretch
from tpkernels.gate.clock.model import Board, KernelPrediction, predict_built, steps_of
from tpkernels.gate.clock.processor import run
from tpkernels.gate.clock.semantics import translate
from tpkernels.gate.clock.timeline import Run, WarpSpan
from tpkernels.gate.clocking import built, clocked
from tpkernels.pictures.charts import Lane, ProcessorBar, TimeSpan, lanes, merged_intervals, processor
from tpkernels.pictures.figure import Picture
from tpkernels.planning.gpus import gpu_named
from tpkernels.planning.step_time import (
    DIRECTIONS,
    IN_ROUNDS,
    MOST_RANKS,
    OPERATORS,
    PUBLISHED,
    WAYS,
    Sizes,
)

DIED: Clocked | str = "the compiler died"
PEAK = 989.4  # TFLOP/s of an H100 SXM with 16-bit operands, by its data sheet
DRAWN = 12  # the most steps of a tile to draw: others are alike
NOTE = "by a model of an H100 SXM; nothing here was measured, see docs/clock.md"
GROUP = 4  # warps that multiply together, and mostly do the same
MOST_GROUPS = 12  # to draw
ENGINES = {"products": "tensor cores", "copies": "copies in flight", "stores": "stores in flight"}


@dataclass(frozen=True, slots=True)
class ClockRequest:
    """The entry to clock, and the sizes of its product."""

    entry: Entry
    shape: tuple[int, int, int]  # tokens, out_features, in_features
    drawing: bool

    def __str__(self) -> str:
        return self.entry.name


@dataclass(frozen=True, slots=True)
class Clocked:
    name: str
    cost: Cost
    steps: int  # of a tile
    waves: float
    predicted: KernelPrediction
    drawn: tuple[Run, int, int] | None = None  # of tiles and steps on one SM
    peak: float = PEAK  # TFLOP/s for its operands


def clock_kernel(request: ClockRequest) -> Clocked | str:
    """Compile and clock a kernel in this process; return an error text if that fails."""
    facts = facts_or_error(CompileJob(request.entry, CLOCKED[0]))
    if isinstance(facts, str):
        return f"does not compile: {facts}"
    try:
        return _clocked(request, facts)
    except Exception as error:  # a shape that the kernel is not compiled for, an unknown instruction
        return f"{type(error).__name__}: {error}"


def _clocked(request: ClockRequest, facts: Facts) -> Clocked:
    entry, board = request.entry, Board()
    workload = of_entry(entry, request.shape)
    compiled = built(entry, CLOCKED[0], facts)
    workload.on_one(compiled, workload.unit, SHORT)  # refuses a shape that this is not compiled for
    # a block of a kernel without products does as much as the shape says
    launching = FromCatalog(entry, None if workload.product else request.shape)
    cost = clocked(CompileJob(entry, CLOCKED[0]), facts, launching)
    steps, drawn = steps_of(workload), None
    if request.drawing:
        tiles, deep = workload.unit * cost.resident, min(steps, DRAWN)
        drawn = run(translate(compiled.code), workload.on_one(compiled, tiles, deep)), tiles, deep
    waves = workload.tiles / (board.processors * cost.resident)
    peak = 2 * PEAK if workload.product and workload.product.itemsize == 1 else PEAK
    predicted = predict_built(compiled, workload, cost, board)
    return Clocked(entry.name, cost, steps, waves, predicted, drawn, peak)


def table(shape: tuple[int, int, int], found: Sequence[Clocked]) -> str:
    width = max(len(one.name) for one in found)
    sizes = " x ".join(f"{size:,}" for size in shape)
    heading = (
        f"{'kernel':<{width}}  {'step':>6}  {'waits for':<14}  {'edge':>7}  {'waits for':<14}  {'busy':>4}  "
        f"{'waves':>6}  {'time (model)':>16}  {'TFLOP/s':>7}  {'of peak':>7}  bound by"
    )
    return "\n".join(
        [
            f"{sizes} tokens, out_features and in_features, {NOTE}",
            "",
            heading,
            *(f"{one.name:<{width}}  {_row(one)}" for one in found),
            "",
            *_explanations(found),
        ]
    )


def _row(one: Clocked) -> str:
    cost, predicted = one.cost, one.predicted
    step, its_wait = ("-", "-") if cost.step is None else (f"{cost.step.cycles:,.0f}", awaited(cost.step))
    multiplies = cost.step is not None
    busy, tflops, share = (
        (f"{predicted.busy:.0%}", f"{predicted.tflops:,.0f}", f"{predicted.tflops / one.peak:.0%}")
        if multiplies
        else ("-", "-", "-")
    )
    return (
        f"{step:>6}  {its_wait:<14}  {cost.edge.cycles:>7,.0f}  {awaited(cost.edge):<14}  {busy:>4}  "
        f"{one.waves:>6.2f}  {_time(predicted):>16}  {tflops:>7}  {share:>7}  {predicted.bound}"
    )


def _time(predicted: KernelPrediction) -> str:
    unit, size = ("ms", 1e3) if predicted.seconds >= 1e-3 else ("us", 1e6)
    longer = f"-{predicted.slowest * size:.3g}" if predicted.open else ""
    return f"{predicted.seconds * size:.3g}{longer} {unit} +-{predicted.error:.0%}"


def awaited(stretch: Stretch) -> str:
    """Return the longest wait of warps; "nothing" if they mostly issue."""
    cause = next(iter(stretch.waits), "instructions")
    return "nothing" if cause == "instructions" else cause.removeprefix("scoreboard: ")


def _explanations(found: Sequence[Clocked]) -> Iterator[str]:
    yield "step: cycles of a step of the main loop, of all blocks on an SM; edge: of a tile beyond its steps"
    yield "busy: share of the time in which tensor cores multiply; +-: what the model is off by as a rule"
    without = [one.name for one in found if one.cost.step is None]
    if without:
        some = f"{len(without)} kernels" if len(without) > 1 else without[0]
        yield f"without a main loop of products: {some}; edge is of a block, and waves are of blocks"
    if any(one.predicted.open for one in found):
        yield "two times: some SMs load while others compute; all SMs in step, and memory rests meanwhile"
    if guessed := [one.name for one in found if one.cost.guessed]:
        yield f"branches that depend on data were guessed in {', '.join(guessed)}"


def as_json(shape: tuple[int, int, int], found: Sequence[Clocked], failures: Sequence[str]) -> dict[str, Any]:
    return {
        "note": NOTE,
        "shape": dict(zip(("tokens", "out_features", "in_features"), shape, strict=True)),
        "failures": list(failures),
        "kernels": [
            {
                "entry": one.name,
                "steps": one.steps,
                "waves": one.waves,
                "cost": one.cost.as_json(),
                "model": asdict(one.predicted) | {"of_peak": one.predicted.tflops / one.peak},
            }
            for one in found
        ],
    }


def picture_of(one: Clocked) -> Picture:
    """Draw one SM's work: its engines, then a lane for each group of warps."""
    assert one.drawn is not None, "asked for with --picture"
    timed, tiles, steps = one.drawn
    groups = [*_groups(timed)]
    of_steps = f" of {steps} of {one.steps} steps" if one.steps else ""
    note = f"{tiles} {'tile' if one.steps else 'block'}{'s' * (tiles > 1)}{of_steps} on one SM, by a model"
    if (more := len(groups) - MOST_GROUPS) > 0:
        note += f"; {more} more groups of warps are not shown"
    return processor(one.name, [*_engines(timed), *groups[:MOST_GROUPS]], note=note)


def _engines(run: Run) -> Iterator[Lane]:
    for kind, name in ENGINES.items():
        busy = merged_intervals((span.start, span.end) for span in run.spans if span.lane == kind)
        doings = [ProcessorBar(kind, start, stop) for start, stop in busy]  # which can be added up
        if doings:
            share = sum(doing.stop - doing.start for doing in doings) / max(run.cycles, 1.0)
            yield Lane(name, doings, f"{share:.0%} of the time")


def _groups(run: Run) -> Iterator[Lane]:
    """Yield a lane for the first warp of each four: warps that multiply together wait together."""
    for block, (start, stop) in enumerate(run.blocks):
        for first in range(0, len(run.stalls), GROUP):
            its = [span for span in run.spans if (span.block, span.warp) == (block, first)]
            doings = [ProcessorBar("instructions", start, stop)]
            doings += [
                ProcessorBar(span.lane, span.start, span.end)
                for span in its
                if span.lane in ("epilogue", "waits")
            ]
            waiting = sum(span.end - span.start for span in its if span.lane == "waits")
            last = min(first + GROUP, len(run.stalls)) - 1
            name = f"warps {first}-{last}" if last > first else f"warp {first}"
            of_block = f", block {block}" * (len(run.blocks) > 1)
            yield Lane(name + of_block, doings, f"waits {waiting / max(stop - start, 1.0):.0%}{_most(its)}")


def _most(spans: Iterable[WarpSpan]) -> str:
    """Return in words the longest wait of the warps."""
    causes: dict[str, float] = {}
    for span in spans:
        if span.lane == "waits":
            causes[span.what] = causes.get(span.what, 0.0) + span.end - span.start
    most = max(causes, key=causes.__getitem__, default="")
    return f": {most.removeprefix('scoreboard: ')}" if most else ""


_LANES = {
    HOST: "host, launches",
    COMPUTE: "computes",
    NCCL: "transfers",
    COPIES: "transfers",
}
_COLUMNS = 72  # of a time line in text


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("op", choices=OPERATORS, metavar="OP", help=", ".join(OPERATORS))
    add_number(parser, "--tokens", "of all ranks", required=True)
    add_number(parser, "--in", "in_features", required=True, dest="features_in")
    of_mlp = "out_features of all ranks; of an MLP the width between"
    add_number(parser, "--out", of_mlp, required=True, dest="features_out")
    add_number(parser, "--tp", "tensor-parallel ranks of one machine", required=True, metavar="R")
    parser.add_argument("--gpu", default="h100", metavar="NAME", help="h100 (default), h200 or a100")
    parser.add_argument(
        "--directions", nargs="+", choices=DIRECTIONS, default=DIRECTIONS,
        metavar="NAME", help="forward, backward (default both)",
    )  # fmt: skip
    ways = (*WAYS, *IN_ROUNDS)
    told = f"{', '.join(ways)}; default {', '.join(WAYS)}"
    parser.add_argument("--ways", nargs="+", choices=ways, default=WAYS, metavar="WAY", help=told)
    parser.add_argument("--no-sequence-parallel", dest="sequence_parallel", action="store_false")
    parser.add_argument("--graph", action="store_true", help="launched by a CUDA graph, not by the host")
    parser.add_argument("--json", type=written_to, metavar="FILE", help="write all numbers into FILE")
    parser.add_argument("--picture", type=drawn_into, metavar="FILE", help="draw time lines, as SVG or PNG")


def main(options: Namespace) -> int:
    with bad_use_if(ValueError, MachineError):  # MachineError: sizes that no GPU holds
        if options.tp > MOST_RANKS:
            raise ValueError(f"--tp: expected at most {MOST_RANKS} ranks of one machine, got {options.tp}")
        node = Node.of(gpu_named(options.gpu))
        if options.graph:
            node = node.with_host(GRAPH)
        features = options.features_in, options.features_out
        sizes = Sizes(options.tokens, *features, options.tp, options.sequence_parallel)
        found = [
            predict(options.op, direction, way, sizes, node)
            for direction in options.directions
            for way in options.ways
        ]
    print("\n".join(_text(options, sizes, found)))
    predictions = [each.as_json(sizes.ranks) for each in found]
    write_json(options.json, {"model": True, "op": options.op, "gpu": node.gpu.name, "ways": predictions})
    if options.picture is not None:
        _picture(options, sizes, found).write(options.picture)
    return 0


def _text(options: Namespace, sizes: Sizes, found: Sequence[Predicted]) -> Iterator[str]:
    split = "with" if sizes.sequence_parallel else "without"
    yield (
        f"{options.op}, {sizes.tokens} tokens, {sizes.features_in} -> {sizes.features_out} features, bf16, "
        f"on {sizes.ranks} x {gpu_named(options.gpu).name}, {split} sequence parallelism"
    )
    yield "model: microseconds of a call among many like it; nothing here was measured on a GPU"
    for direction in options.directions:
        here = [each for each in found if each.direction == direction]
        first = here[0].seconds
        yield ""
        yield (
            f"{direction:11}{'call':>7}{'products':>10}{'transfers':>11}{'exposed':>9}{'host':>7}   "
            f"against {here[0].way}"
        )
        for each in here:
            times = each.seconds, each.products, each.transfers, each.exposed, each.host
            columns = [
                f"{1e6 * seconds:{width}.0f}" for seconds, width in zip(times, (7, 10, 11, 9, 7), strict=True)
            ]
            yield f"{each.way:11}{''.join(columns)}   {first / each.seconds:.2f}x{_said(each.way)}"
        for each in here:
            yield from _hiding(each)
            yield from _time_line(each)


def _said(way: str) -> str:
    if way not in PUBLISHED:
        return "   no time of this way is published"
    low, high = PUBLISHED[way]
    whose = "" if way == "naive" else " of others' kernels"
    return f"   published times{whose}: {low:g} to {high:g} of the model's"


def _hiding(each: Predicted) -> Iterator[str]:
    """Yield the products that hide each transfer."""
    yield f"\n{each.way}, {each.direction}:"
    for name, beside in each.hidden.items():
        behind = ", ".join(f"{1e6 * seconds:.0f} behind {other}" for other, seconds in beside.items())
        yield f"  {name}: {behind or 'nothing beside it'}"


def _time_line(each: Predicted) -> Iterator[str]:
    """Yield the time line of a rank, a line for each queue: # computes, = moves."""
    ours = _lasting(each)
    start = min((ran.start for ran in ours if ran.task.queue[0] != HOST), default=0.0)
    stop = max((ran.stop for ran in ours), default=0.0)
    scale = _COLUMNS / max(stop - start, 1e-9)
    for queue, mark in ((COMPUTE, "#"), (NCCL, "="), (COPIES, "=")):
        line = [" "] * _COLUMNS
        here = [ran for ran in ours if ran.task.queue[0] == queue]
        for ran in here:
            first, last = int((ran.start - start) * scale), int((ran.stop - start) * scale)
            line[first : max(first + 1, last)] = mark * (max(first + 1, last) - first)
        if here:
            yield f"  {queue:8}|{''.join(line[:_COLUMNS])}|"


def _lasting(each: Predicted) -> list[Ran]:
    return [ran for ran in each.ran if ran.stop > ran.start]


def _picture(options: Namespace, sizes: Sizes, found: Sequence[Predicted]) -> Picture:
    panels = {}
    for each in found:
        ours = _lasting(each)
        first = min(ran.start for ran in ours if ran.task.queue[0] != HOST)  # the host may be calls ahead
        panels[f"{each.way}, {each.direction}"] = [
            TimeSpan(0, _LANES[str(ran.task.queue[0])], ran.task.name, max(first, ran.start), ran.stop)
            for ran in ours
            if ran.stop > first and (ran.task.kind == TRANSFER or ran.task.queue[0] in (COMPUTE, HOST))
        ]
    heading = f"{options.op}, {sizes.tokens} tokens on {sizes.ranks} GPUs: model"
    return lanes(heading, panels, note="rank 0; nothing here was measured")
