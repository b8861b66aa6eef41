"""What an instruction does beyond its own warp's values, on which the SM acts; and faults of machine code."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Jump:
    index: int  # of the next instruction


@dataclass(frozen=True, slots=True)
class Exit:
    pass


@dataclass(frozen=True, slots=True)
class BarrierSync:
    """All warps of a block wait for one another."""


@dataclass(frozen=True, slots=True)
class InitMbarrier:
    address: int | None  # in shared memory
    count: int | None  # of arrivals that end a phase


@dataclass(frozen=True, slots=True)
class Arrive:
    address: int | None
    count: int
    expected_bytes: int  # that copies are to bring before the phase ends


@dataclass(frozen=True, slots=True)
class AwaitPhase:
    """The warp goes on when the phase of this parity is over."""

    address: int | None
    parity: int | None


@dataclass(frozen=True, slots=True)
class Copy:
    """A box from global to shared memory."""

    descriptor: int | None  # offset of the parameter in constant bank 0
    mbarrier: int | None


@dataclass(frozen=True, slots=True)
class Put:
    """A box from shared to global memory."""

    descriptor: int | None


@dataclass(frozen=True, slots=True)
class Global:
    bytes: int  # of all active lanes
    sectors: int  # of 32 bytes; where an address is unknown, as many as the bytes fill
    store: bool
    shared: bool  # into shared memory, past the registers


@dataclass(frozen=True, slots=True)
class Local:
    """A spilled register, or a part of the stack, loaded or stored."""

    bytes: int


Effect = Jump | Exit | BarrierSync | InitMbarrier | Arrive | AwaitPhase | Copy | Put | Global | Local


class ClockFault(RuntimeError):
    """A mistake of the kernel, or of how it is read; the message says which warp, where, why."""


class NeverEnds(ClockFault):
    """More instructions than the budget, or a path that leaves the code without EXIT."""


class Deadlock(ClockFault):
    """All warps that are left wait for each other."""


class UnknownTrips(ClockFault):
    """A loop goes on as long as data says, and the launch does not say what the data is."""
