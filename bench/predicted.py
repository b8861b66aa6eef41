"""`python -m bench predicted WHAT`: how far the model of tensor-parallel calls is from what was measured.

published   against published times on H100s (bench/published_overlap.py)
heads       no comparison: log-probabilities of a head, ours and unfused (bench/cases/predicted_head.py)
link        against this machine: two ranks on a throttled link, whose constants are measured in the same run
"""

from __future__ import annotations

import json
import statistics
import sys
from argparse import ArgumentParser, Namespace
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from bench.cases.linear_overlap import IN, TOKENS
from bench.cases.predicted_head import HEADS, head_seconds
from bench.cases.predicted_link import CASES, Constants, measure, paused
from bench.linked_ranks import MeasuredRanks, ran
from bench.published_overlap import PUBLISHED, THEIR_HOST, Published
from bench.slow_link import SlowLink, why_not
from bench.streams.prediction import predict
from bench.streams.times import GRAPH, Node
from tpkernels.cli import BadUse
from tpkernels.planning.gpus import gpu_named
from tpkernels.planning.step_time import Sizes

TARGET = 0.08  # of overlap efficiency
WINS = (
    ("column_linear", "forward"), ("column_linear", "backward"), ("row_linear", "forward"),
    ("row_linear", "backward"), ("gated_mlp", "forward"), ("gated_mlp", "backward"),
)  # fmt: skip
WIN_TOKENS, WIN_RANKS, FEATURES = (512, 2048, 8192, 32768), (2, 4, 8), 14336
WINS_HEADER = "| call | T, R | naive, us | c10d | symmetric | naive in a graph, us | c10d | symmetric |"

HEAD_OPTIONS: dict[str, dict[str, Any]] = {
    "unfused": {}, "ours": {}, "chunks of 1024": {"chunk_tokens": 1024},
    "entropies": {"return_entropy": True},
}  # fmt: skip
HEADS_HEADER = f"| ms | {' | '.join(HEAD_OPTIONS)} | unfused in a graph | ours |"


@dataclass(frozen=True)
class Compared:
    """Seconds of a case on the link: predicted, and measured."""

    case: str
    megabits: float
    constants: Constants
    predicted: Mapping[str, float]
    measured: Mapping[str, float]

    @property
    def efficiencies(self) -> tuple[float, float]:
        return efficiency(self.predicted), efficiency(self.measured)


def efficiency(seconds: Mapping[str, float]) -> float:
    """What is saved, in parts of what could be."""
    naive, ours, floor = (seconds[name] for name in ("naive", "ours", "floor"))
    return (naive - ours) / (naive - floor)


def add_options(parser: ArgumentParser, words: Sequence[str]) -> None:
    parser.add_argument("what", choices=("published", "wins", "heads", "link"))
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all of it into FILE")
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="of the link (default 9)")
    parser.add_argument("--megabits", type=float, nargs="+", default=[100, 150, 200, 300], metavar="RATE")
    parser.add_argument("--cases", nargs="+", default=CASES, choices=CASES, metavar="CASE")
    parser.add_argument(
        "--pauses", action="store_true", help="products wait instead of multiplying: for a busy machine"
    )


def main(options: Namespace) -> int:
    if options.what == "published":
        found, text = _published()
    elif options.what == "wins":
        found, text = _wins()
    elif options.what == "heads":
        found, text = _heads()
    else:
        if reason := why_not():
            raise BadUse(reason)
        if options.rounds < 2:
            raise BadUse(f"--rounds: expected at least 2, got {options.rounds}")
        found, text = _link(options)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(text)
    return 0


def model_of(each: Published) -> float:
    """Microseconds."""
    sizes = Sizes(each.tokens, each.features_in, each.features_out, each.ranks)
    node = Node.of(gpu_named("h100")).with_host(THEIR_HOST)
    return 1e6 * predict(each.operator, "forward", each.way, sizes, node).seconds


def _published() -> tuple[list[dict[str, Any]], str]:
    rows = [(each, model_of(each)) for each in PUBLISHED]
    groups: dict[tuple[str, str, str, str], list[float]] = defaultdict(list)
    for each, model in rows:
        groups[each.use, each.source, each.way, each.name].append(model / each.microseconds - 1)
    lines = [
        "model: nothing here was measured by us",
        "",
        "| source | shape | its name | | figures | mean error | spread | worst |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (use, source, way, name), errors in groups.items():
        spread, worst = statistics.pstdev(errors), max(errors, key=abs)
        mean = statistics.mean(errors)
        lines.append(
            f"| {source} | {way} | {name} | {use} | {len(errors)} | {mean:+.0%} | {spread:.0%} | "
            f"{worst:+.0%} |"
        )
    found = [{**asdict(each), "model_microseconds": model} for each, model in rows]
    return found, "\n".join(lines)


def _wins() -> tuple[list[dict[str, Any]], str]:
    """Each way against naive, all launched by the host, and all by a CUDA graph."""
    eager = Node.of(gpu_named("h100"))
    found, lines = [], [WINS_HEADER, "|---|---|---|---|---|---|---|---|"]
    for (operator, direction), tokens, ranks in product(WINS, WIN_TOKENS, WIN_RANKS):
        wide = (FEATURES, 4096) if operator == "row_linear" else (4096, FEATURES)
        sizes = Sizes(tokens, *wide, ranks)
        cells = []
        for launched, node in (("host", eager), ("graph", eager.with_host(GRAPH))):
            seconds = {
                way: predict(operator, direction, way, sizes, node).seconds
                for way in ("naive", "c10d", "symmetric")
            }
            found.append({"operator": operator, "direction": direction, "launched by": launched,
                          **asdict(sizes), "model_seconds": seconds})  # fmt: skip
            ratios = (seconds["naive"] / seconds[way] for way in ("c10d", "symmetric"))
            cells += [f"{1e6 * seconds['naive']:.0f}", *(f"{ratio:.2f}" for ratio in ratios)]
        lines.append(f"| {operator} {direction} | {tokens}, {ranks} | " + " | ".join(cells) + " |")
    return found, "\n".join(lines)


def _heads() -> tuple[list[dict[str, Any]], str]:
    """Forward of a frozen head, and a step, launched by the host and by a CUDA graph."""
    eager = Node.of(gpu_named("h100"))
    found, lines = [], [HEADS_HEADER, "|---|---|---|---|---|---|---|"]
    for head, backward in product(HEADS, (False, True)):
        cells = []
        for launched, node in (("host", eager), ("graph", eager.with_host(GRAPH))):
            seconds = {
                name: head_seconds("unfused" if name == "unfused" else "ours", head, node,
                                   backward=backward, **options)
                for name, options in HEAD_OPTIONS.items()
            }  # fmt: skip
            found.append({**asdict(head), "backward": backward, "launched by": launched,
                          "model_seconds": seconds})  # fmt: skip
            times = [f"{1e3 * each:.2f}" for each in seconds.values()]
            cells += times if launched == "host" else times[:2]
        what = "forward and backward" if backward else "forward, frozen"
        lines.append(f"| {head.name}, {what} | " + " | ".join(cells) + " |")
    return found, "\n".join(lines)


def _link(options: Namespace) -> tuple[list[dict[str, Any]], str]:
    compared = []
    with SlowLink(bits_per_second=1e9) as link:
        for case in options.cases:
            for megabits in options.megabits:
                by_rank = link.run(
                    paused if options.pauses else measure, case, megabits, options.rounds, timeout=600
                )
                constants, measured = by_rank[0]
                compared.append(Compared(case, megabits, constants, predict_link(case, constants), measured))
                model, seen = compared[-1].efficiencies
                print(f"{case}, {megabits:g} Mbit/s: {model:.2f}, measured {seen:.2f}", file=sys.stderr)
    lines = [
        "| what | Mbit/s | in turn: model, measured | overlapped | floor | efficiency | off |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in compared:
        columns = [
            f"{1e3 * each.predicted[name]:.0f}, {1e3 * each.measured[name]:.0f}"
            for name in ("naive", "ours", "floor")
        ]
        model, measured_one = each.efficiencies
        off = model - measured_one
        columns.append(f"{model:.2f}, {measured_one:.2f} | {off:+.2f}")
        lines.append(f"| {each.case} | {each.megabits:g} | " + " | ".join(columns) + " |")
    offs = [abs(model - seen) for model, seen in (each.efficiencies for each in compared)]
    within = sum(off <= TARGET for off in offs)
    lines.append(
        f"\nwithin {TARGET}: {within} of {len(offs)}; mean {statistics.mean(offs):.3f}, worst {max(offs):.3f}"
    )
    found = [
        {**asdict(each), "efficiency": dict(zip(("model", "measured"), each.efficiencies, strict=True))}
        for each in compared
    ]
    return found, "\n".join(lines)


def predict_link(case: str, constants: Constants) -> dict[str, float]:
    """Seconds of the slower rank: in turn, overlapped, and the floor."""
    return {
        "naive": _call(case, constants, overlap=False),
        "ours": _call(case, constants, overlap=True),
        "floor": _floor(case, constants),
    }


def machine_of(constants: Constants) -> MeasuredRanks:
    shard_bytes = TOKENS // 2 * IN * 4
    return MeasuredRanks(
        product=lambda kernel, rows: _between(constants.products[kernel], rows),
        sum=constants.sum,
        zeros=constants.zeros,
        bytes_a_second=shard_bytes / (constants.message - constants.notice / 2),
        notice=constants.notice / 2,
        stolen=constants.stolen,
        skew=constants.skew,
    )


def _call(case: str, constants: Constants, *, overlap: bool) -> float:
    return max(each.stop for each in ran(case, machine_of(constants), overlap=overlap))


def _floor(case: str, constants: Constants) -> float:
    """All products and all bytes at once; sums of slots afterwards, where there are any."""
    kind, direction = case.split()
    moved = constants.message * (2 if case == "column backward" else 1)
    products = sum(seconds[TOKENS] for seconds in constants.products.values())
    summed = constants.sum if (kind == "column") == (direction == "backward") else 0.0
    slowed = products + constants.stolen * min(moved, products / (1 - constants.stolen))
    return max(slowed, moved) + summed


def _between(seconds: Mapping[int, float], rows: int) -> float:
    """By the two sizes around it."""
    known = sorted(seconds)
    if rows <= known[0]:
        return seconds[known[0]] * rows / known[0]
    for low, high in pairwise(known):
        if rows <= high:
            share = (rows - low) / (high - low)
            return seconds[low] + share * (seconds[high] - seconds[low])
    return seconds[known[-1]] * rows / known[-1]
