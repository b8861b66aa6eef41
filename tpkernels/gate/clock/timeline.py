"""What a run of the processor leaves: cycles, what warps waited for, when what happened."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


class Span(NamedTuple):
    """A stretch of a time line."""

    block: int
    warp: int
    lane: str  # "products", "copies", "stores", "waits" or "epilogue"
    start: float
    end: float
    what: str


class Mark(NamedTuple):
    """The issue of an instruction that tells tiles and steps apart: a product, wait, copy, put, EXIT."""

    block: int
    warp: int
    time: float
    opcode: str
    step: int  # its index in the program


class Wait(NamedTuple):
    """A warp waited for a load or a copy."""

    block: int
    warp: int
    start: float
    end: float
    what: str  # opcode that was waited for
    step: int  # the index of the one that waited
    issued: float  # when the load was
    serial: bool  # the load was issued only after the warp's wait before this one had ended


@dataclass(frozen=True, slots=True)
class Run:
    cycles: float  # from the start of the first block to the end of the last one
    tensor: float  # cycles that products take at full speed
    stalls: tuple[Mapping[str, float], ...]  # by warp of a block, all blocks together: cause -> cycles
    blocks: tuple[tuple[float, float], ...]  # start and end of each
    instructions: int  # issued
    guessed: int  # branches on unknown values
    fetched: int  # bytes, from global memory
    copied: int  # of these, by the copy engine
    stored: int  # bytes, to it
    marks: tuple[Mark, ...]
    waits: tuple[Wait, ...]
    spans: tuple[Span, ...]  # empty if they were switched off


SHORTEST = 16.0  # cycles of a wait that a time line shows


class Recorder:
    """Collects what a `Run` lists."""

    def __init__(self, drawing: bool) -> None:
        self.drawing = drawing
        self.marks: list[Mark] = []
        self.waits: list[Wait] = []
        self.spans: list[Span] = []

    def span(self, block: int, warp: int, lane: str, start: float, end: float, what: str) -> None:
        if self.drawing:
            self.spans.append(Span(block, warp, lane, start, end, what))

    def stalled(self, block: int, warp: int, start: float, end: float, cause: str) -> None:
        if self.drawing and end - start >= SHORTEST:
            self.spans.append(Span(block, warp, "waits", start, end, cause))
