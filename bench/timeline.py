"""A time line of what ran when: as a Chrome trace (for chrome://tracing and Perfetto), and as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any

WIDTH, LEFT, RIGHT, TOP = 980, 150, 24, 64
LANE, GAP, TITLE = 30, 8, 34  # heights: a lane, the space below it, the head of a panel
STRAY = 0.005  # the part of all bytes, at either end, that may be something else
FILL = {"computes": "#2f6fb5", "receives": "#e2973b"}


@dataclass(frozen=True)
class Span:
    """Something that lasted, in seconds of a clock that all ranks share."""

    rank: int
    doing: str  # a key of FILL
    name: str
    start: float
    stop: float

    @property
    def lane(self) -> tuple[int, str]:
        return self.rank, self.doing


@dataclass(frozen=True)
class Sample:
    """How many bytes a rank had received at a time."""

    time: float
    received: int


def pieces_received(rank: int, samples: Sequence[Sample], sizes: Sequence[int]) -> list[Span]:
    """When each of some pieces arrived, one after the other, by a counter of the bytes that came in.

    The counter also has headers of packets, and a little that says what came the other way: sizes are taken
    as shares of all that came, but for its ends.
    """
    first, total = samples[0].received, samples[-1].received - samples[0].received
    shares = [sum(sizes[:count]) / sum(sizes) for count in range(len(sizes) + 1)]
    inner = [min(max(share, STRAY), 1 - STRAY) for share in shares]
    times = [_time_of(samples, first + share * total) for share in inner]
    return [
        Span(rank, "receives", f"piece {number}", start, stop)
        for number, (start, stop) in enumerate(pairwise(times), 1)
    ]


def _time_of(samples: Sequence[Sample], received: float) -> float:
    """When the counter reached `received`."""
    for before, after in pairwise(samples):
        if after.received >= received:
            share = (received - before.received) / max(1, after.received - before.received)
            return before.time + share * (after.time - before.time)
    return samples[-1].time


def chrome_trace(panels: Mapping[str, Sequence[Span]]) -> dict[str, Any]:
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


def to_svg(heading: str, panels: Mapping[str, Sequence[Span]]) -> str:
    """Panels one below the other, on one scale of time."""
    longest = max(max(s.stop for s in spans) - min(s.start for s in spans) for spans in panels.values())
    scale = (WIDTH - LEFT - RIGHT) / longest
    parts, y = [_text(LEFT, 30, heading, size=17, weight=600)], TOP
    for title, spans in panels.items():
        begin, end = min(span.start for span in spans), max(span.stop for span in spans)
        lanes = sorted({span.lane for span in spans})
        parts.append(_text(LEFT, y + 16, f"{title}: {1e3 * (end - begin):.0f} ms", size=14, weight=600))
        y += TITLE
        bottom = y + len(lanes) * (LANE + GAP)
        parts += _grid(y - 4, bottom, longest, scale)
        right = LEFT + scale * (end - begin)
        parts.append(_line(right, y - 10, right, bottom, "#b03030", 1.5))
        for lane in lanes:
            parts.append(_text(LEFT - 10, y + LANE / 2 + 5, f"rank {lane[0]} {lane[1]}", anchor="end"))
            for span in spans:
                if span.lane == lane:
                    left, width = scale * (span.start - begin), scale * (span.stop - span.start)
                    parts += _block(LEFT + left, y, width, span)
            y += LANE + GAP
        y += 14
    parts += _axis(y + 4, longest, scale)
    height = y + 34
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" font-family="Helvetica, Arial, sans-serif">'
    )
    background = f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>'
    return "\n".join([head, background, *parts, "</svg>\n"])


def _step(longest: float) -> float:
    """Seconds between two lines: 1, 2 or 5 times a power of ten, about eight of them."""
    exponent = 1e-6
    while True:
        for factor in (1, 2, 5):
            if longest / (factor * exponent) <= 9:
                return factor * exponent
        exponent *= 10


def _grid(top: float, bottom: float, longest: float, scale: float) -> list[str]:
    step = _step(longest)
    return [
        _line(LEFT + scale * number * step, top, LEFT + scale * number * step, bottom, "#e4e4e4", 1)
        for number in range(int(longest / step) + 1)
    ]


def _axis(y: float, longest: float, scale: float) -> list[str]:
    step = _step(longest)
    return [
        _text(LEFT + scale * number * step, y, f"{1e3 * number * step:.0f}", size=12, anchor="middle")
        for number in range(int(longest / step) + 1)
    ] + [_text(LEFT - 10, y, "ms", size=12, anchor="end")]


def _block(x: float, y: float, width: float, span: Span) -> list[str]:
    title = f"<title>{escape(span.name)}: {1e3 * (span.stop - span.start):.1f} ms</title>"
    parts = [
        f'<rect x="{x:.1f}" y="{y}" width="{max(width - 1, 1):.1f}" height="{LANE}" rx="3" '
        f'fill="{FILL[span.doing]}">{title}</rect>'
    ]
    short = span.name.rpartition(" ")[2]  # of "piece 3" the number
    label = next((name for name in (span.name, short) if width > 7 * len(name) + 6), "")
    return [*parts, _text(x + width / 2, y + LANE / 2 + 5, label, size=12, anchor="middle", fill="#ffffff")]


def _text(
    x: float,
    y: float,
    text: str,
    *,
    size: int = 13,
    anchor: str = "start",
    fill: str = "#222222",
    weight: int = 400,
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" '
        f'fill="{fill}">{escape(text)}</text>'
    )


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, width: float) -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" '
        f'stroke-width="{width}"/>'
    )
