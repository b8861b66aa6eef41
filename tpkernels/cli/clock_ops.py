"""`python -m tpkernels clock column_linear ...`: predicts a tensor-parallel call's time in each way.

Naive is `F.linear` after a blocking collective; c10d and symmetric are ours; decomposed has the schedule of
other libraries' kernels. Needs no GPU.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence

from tpkernels.cli import add_number, bad_use_if, drawn_into, write_json, written_to
from tpkernels.gpus import gpu_named
from tpkernels.pictures.figure import Picture
from tpkernels.pictures.lanes import TimeSpan, lanes
from tpkernels.planning.calls import DIRECTIONS, MOST_RANKS, OPERATORS, PUBLISHED, WAYS, Sizes
from tpkernels.streams import MachineError
from tpkernels.streams.prediction import Predicted, predict
from tpkernels.streams.simulation import COMPUTE, COPIES, HOST, NCCL, TRANSFER, Ran
from tpkernels.streams.times import GRAPH, Node

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
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, metavar="WAY", help=", ".join(WAYS))
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
