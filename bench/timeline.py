"""What a time line is made from, and its Chrome trace, for chrome://tracing and Perfetto."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tpkernels.pictures.charts import TimeSpan

STRAY = 0.005  # the part of all bytes, at either end, that may be something else


@dataclass(frozen=True)
class Sample:
    """How many bytes a rank had received at a time."""

    time: float
    received: int


def pieces_received(rank: int, samples: Sequence[Sample], sizes: Sequence[int]) -> list[TimeSpan]:
    """When each of some pieces arrived, one after the other, by a counter of the bytes that came in.

    The counter also has headers of packets, and a little that says what came the other way: sizes are taken
    as shares of all that came, but for its ends.
    """
    first, total = samples[0].received, samples[-1].received - samples[0].received
    shares = [sum(sizes[:count]) / sum(sizes) for count in range(len(sizes) + 1)]
    inner = [min(max(share, STRAY), 1 - STRAY) for share in shares]
    times = [_time_of(samples, first + share * total) for share in inner]
    return [
        TimeSpan(rank, "receives", f"piece {number}", start, stop)
        for number, (start, stop) in enumerate(pairwise(times), 1)
    ]


def _time_of(samples: Sequence[Sample], received: float) -> float:
    """When the counter reached `received`."""
    for before, after in pairwise(samples):
        if after.received >= received:
            share = (received - before.received) / max(1, after.received - before.received)
            return before.time + share * (after.time - before.time)
    return samples[-1].time


def chrome_trace(panels: Mapping[str, Sequence[TimeSpan]]) -> dict[str, Any]:
    """A process for each panel, a thread for each lane."""
    events: list[dict[str, Any]] = []
    for number, (title, spans) in enumerate(panels.items()):
        events.append({"ph": "M", "name": "process_name", "pid": number, "args": {"name": title}})
        start = min(span.start for span in spans)
        for thread, lane in enumerate(sorted({span.lane for span in spans})):
            name = f"rank {lane[0]} {lane[1]}"
            events.append(
                {"ph": "M", "name": "thread_name", "pid": number, "tid": thread, "args": {"name": name}}
            )
            events += [
                {
                    "ph": "X",
                    "name": span.name,
                    "pid": number,
                    "tid": thread,
                    "ts": 1e6 * (span.start - start),
                    "dur": 1e6 * (span.stop - span.start),
                }
                for span in spans
                if span.lane == lane
            ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}
