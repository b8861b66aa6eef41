"""Records one forward call of a column- or row-parallel linear on a throttled link, in turn and at once.

    python -m bench.cases.linear_timeline column out/overlap     writes out/overlap.json and out/overlap.svg

The products are timed where they are called, and the transfers by the bytes that the network device counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from bench.cases.linear_overlap import IN, OUT_SHARD, TOKENS
from bench.slow_link import SlowLink, throttle, why_not
from bench.timeline import Sample, chrome_trace, pieces_received
from tpkernels.comm.schedule import gather_plan, parts_of_shard
from tpkernels.dispatch import primitives
from tpkernels.ops import column_linear, row_linear
from tpkernels.pictures.charts import TimeSpan, lanes
from tpkernels.pictures.figure import NO_MATPLOTLIB, can_draw

PANELS = {"one after the other": False, "at once, in pieces": True}
SAMPLE_SECONDS = 0.5e-3


def record(kind: str, ratio: float, rounds: int) -> dict[str, list[TimeSpan]]:
    """On a rank: what it did in the fastest of some calls of each panel."""
    torch.manual_seed(0)
    group = dist.group.WORLD
    assert group is not None
    if kind == "column":
        x, weight = torch.randn(TOKENS // 2, IN), torch.randn(OUT_SHARD, IN)
    else:
        x, weight = torch.randn(TOKENS, OUT_SHARD), torch.randn(IN, OUT_SHARD)
    operator: Callable[..., Tensor] = column_linear if kind == "column" else row_linear

    def call(overlap: bool) -> None:
        with torch.no_grad():
            operator(x, weight, None, group, sequence_parallel=True, overlap=overlap)

    call(True)
    whole = torch.randn(TOKENS, x.shape[1])
    seconds = statistics.median(_seconds(lambda: whole @ weight.T) for _ in range(3))
    throttle(8 * TOKENS // 2 * IN * 4 / (ratio * seconds))
    recorded = {title: [_spans(call, overlap) for _ in range(rounds)] for title, overlap in PANELS.items()}
    fastest = {title: _agreed_fastest(calls) for title, calls in recorded.items()}
    return {title: recorded[title][number] for title, number in fastest.items()}


def _seconds(way: Callable[[], object]) -> float:
    start = time.perf_counter()
    way()
    return time.perf_counter() - start


def _agreed_fastest(calls: list[list[TimeSpan]]) -> int:
    """The call that was soonest over on the slower rank: the same on both."""
    lasted = [max(span.stop for span in spans) - min(span.start for span in spans) for spans in calls]
    times = torch.tensor(lasted)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return int(times.argmin())


def _spans(call: Callable[[bool], None], overlap: bool) -> list[TimeSpan]:
    rank = dist.get_rank()
    spans: list[TimeSpan] = []

    def timed(product: Callable[..., Any], x: int = 0) -> Callable[..., Any]:
        """x: which argument has the rows that are multiplied"""

        @wraps(product)
        def call(*arguments: Any) -> Any:
            start = time.perf_counter()
            result = product(*arguments)
            rows = arguments[x].shape[0]
            spans.append(TimeSpan(rank, "computes", _name(rows, spans), start, time.perf_counter()))
            return result

        return call

    samples, done = [_sample()], threading.Event()

    def watch() -> None:
        while not done.wait(SAMPLE_SECONDS):
            samples.append(_sample())

    dist.barrier()
    samples[:] = [_sample()]
    watcher = threading.Thread(target=watch)
    watcher.start()
    with (  # of all rows, and of those that arrived
        patch.object(primitives, "linear", timed(primitives.linear)),
        patch.object(primitives, "into", timed(primitives.into, x=2)),
    ):
        call(overlap)
    samples.append(_sample())
    done.set()
    watcher.join()
    shard_bytes = TOKENS // 2 * IN * 4
    pieces = [swap.received for swap in gather_plan(TOKENS, 2, rank, parts_of_shard(shard_bytes)).swaps]
    return spans + pieces_received(rank, samples, [piece.stop - piece.start for piece in pieces])


def _name(rows: int, before: list[TimeSpan]) -> str:
    if rows == TOKENS:
        return "all rows"
    pieces = sum(span.name.startswith("piece") for span in before)
    return "own rows" if rows == TOKENS // 2 else f"piece {pieces + 1}"


def _sample() -> Sample:
    """Of all devices of this rank's network but the loopback."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    received = [int(line.split(":")[1].split()[0]) for line in lines if not line.strip().startswith("lo:")]
    return Sample(time.perf_counter(), sum(received))


def write(link: SlowLink, kind: str, target: Path, ratio: float = 1.0, rounds: int = 5) -> Path:
    """Writes the trace and the picture into one folder; returns the path of the picture."""
    by_rank = link.run(record, kind, ratio, rounds, timeout=300)
    panels = {title: [span for spans in by_rank for span in spans[title]] for title in PANELS}
    target.parent.mkdir(parents=True, exist_ok=True)
    target.with_suffix(".json").write_text(json.dumps(chrome_trace(panels), indent=1) + "\n")
    heading = f"Forward of a {kind}-parallel linear layer: 2 ranks, throttled link"
    target.with_suffix(".svg").write_text(lanes(heading, panels).svg)
    return target.with_suffix(".svg")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["column", "row"])
    parser.add_argument("target", type=Path, help="where to write, without suffix")
    arguments = parser.parse_args()
    if reason := why_not() or (None if can_draw() else NO_MATPLOTLIB):
        parser.exit(1, f"{reason}\n")
    with SlowLink(bits_per_second=1e9) as link:
        print(write(link, arguments.kind, arguments.target))


if __name__ == "__main__":
    main()
