"""What an instruction asks of the processor beyond the values that it computes.

`Step.execute` returns one of these, or None: nothing to do, or no lane of the warp takes part.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Jump:
    index: int  # of the next step


@dataclass(frozen=True, slots=True)
class Exit:
    """The last lanes of the warp end."""


@dataclass(frozen=True, slots=True)
class BarrierSync:
    number: int
    threads: int | None  # None: all of the block


@dataclass(frozen=True, slots=True)
class BarrierArrive:
    number: int
    threads: int | None


@dataclass(frozen=True, slots=True)
class InitMbarrier:
    address: int
    count: int  # arrivals that a phase takes


@dataclass(frozen=True, slots=True)
class DropMbarrier:
    address: int


@dataclass(frozen=True, slots=True)
class Arrive:
    address: int
    count: int
    expected_bytes: int


@dataclass(frozen=True, slots=True)
class AwaitPhase:
    """The warp goes on when the phase of this parity is over; its predicate already says that it is."""

    address: int
    parity: int


@dataclass(frozen=True, slots=True)
class Copy:
    """The copy engine brings a box to shared memory, and completes its bytes on an mbarrier."""

    descriptor: int | None  # the parameter's offset in constant bank 0; None: unknown
    shared: int
    mbarrier: int
    bytes: int | None = None  # for a copy that says so itself


@dataclass(frozen=True, slots=True)
class Put:
    """The copy engine brings a box from shared to global memory, or adds it there."""

    descriptor: int | None
    reduce: bool
    bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Global:
    """What the active lanes of a warp load from or store to global memory."""

    bytes: int
    sectors: int  # distinct ones, of 32 bytes
    store: bool
    shared: bool  # straight to shared memory: cp.async


@dataclass(frozen=True, slots=True)
class Local:
    """Spilled registers."""

    bytes: int
    store: bool


@dataclass(frozen=True, slots=True)
class SetRegisters:
    count: int  # a thread of this warp
    acquire: bool  # more than before: waits until other warps have given them back


Effect = (
    Jump
    | Exit
    | BarrierSync
    | BarrierArrive
    | InitMbarrier
    | DropMbarrier
    | Arrive
    | AwaitPhase
    | Copy
    | Put
    | Global
    | Local
    | SetRegisters
)
