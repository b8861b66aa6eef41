"""What a run of the processor leaves: cycles, what warps waited for, when what happened."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


class WarpSpan(NamedTuple):
    """An interval of cycles in which a warp did one kind of work."""

    block: int
    warp: int
    lane: str  # "products", "copies", "stores", "waits" or "epilogue"
    start: float
    end: float
    what: str


class Issue(NamedTuple):
    """The issue of an instruction that tells tiles and steps apart: a product, wait, copy, put, EXIT."""

    block: int
    warp: int
    time: float
    opcode: str
    step: int  # its index in the program


class WarpWait(NamedTuple):
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
    marks: tuple[Issue, ...]
    waits: tuple[WarpWait, ...]
    spans: tuple[WarpSpan, ...]  # empty if they were switched off
