"""What one SM did when, of a run of the clock: engines first, then a lane for each group of warps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tpkernels.gate.clock.timeline import Run, Span
from tpkernels.pictures.figure import Picture
from tpkernels.pictures.kernel import Doing, Lane, processor

GROUP = 4  # warps that multiply together, and mostly do the same
MOST_GROUPS = 12  # that are drawn
ENGINES = {"products": "tensor cores", "copies": "copies in flight", "stores": "stores in flight"}


def time_line(heading: str, run: Run, *, note: str = "") -> Picture:
    """note: a line below the heading"""
    groups = [*_groups(run)]
    more = f"; {len(groups) - MOST_GROUPS} more groups of warps are not shown" * (len(groups) > MOST_GROUPS)
    return processor(heading, [*_engines(run), *groups[:MOST_GROUPS]], note=note + more)


def _engines(run: Run) -> Iterator[Lane]:
    for kind, name in ENGINES.items():
        doings = [*_merged(kind, (span for span in run.spans if span.lane == kind))]
        if doings:
            share = sum(doing.stop - doing.start for doing in doings) / max(run.cycles, 1.0)
            yield Lane(name, doings, f"{share:.0%} of the time")


def _groups(run: Run) -> Iterator[Lane]:
    """The first warp of each four: warps that multiply together wait together."""
    for block, (start, stop) in enumerate(run.blocks):
        for first in range(0, len(run.stalls), GROUP):
            its = [span for span in run.spans if (span.block, span.warp) == (block, first)]
            doings = [Doing("instructions", start, stop)]
            doings += [
                Doing(span.lane, span.start, span.end) for span in its if span.lane in ("epilogue", "waits")
            ]
            waiting = sum(span.end - span.start for span in its if span.lane == "waits")
            last = min(first + GROUP, len(run.stalls)) - 1
            name = f"warps {first}-{last}" if last > first else f"warp {first}"
            of_block = f", block {block}" * (len(run.blocks) > 1)
            yield Lane(name + of_block, doings, f"waits {waiting / max(stop - start, 1.0):.0%}{_most(its)}")


def _most(spans: Iterable[Span]) -> str:
    """What the warps waited for longest."""
    causes: dict[str, float] = {}
    for span in spans:
        if span.lane == "waits":
            causes[span.what] = causes.get(span.what, 0.0) + span.end - span.start
    most = max(causes, key=causes.__getitem__, default="")
    return f": {most.removeprefix('scoreboard: ')}" if most else ""


def _merged(kind: str, spans: Iterable[Span]) -> Iterator[Doing]:
    """Without overlaps, so that what is drawn can be added up."""
    start = stop = None
    for begin, end in sorted((span.start, span.end) for span in spans):
        if stop is None or start is None:
            start, stop = begin, end
        elif begin <= stop:
            stop = max(stop, end)
        else:
            yield Doing(kind, start, stop)
            start, stop = begin, end
    if start is not None and stop is not None:
        yield Doing(kind, start, stop)
