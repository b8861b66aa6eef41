"""What an instruction does beyond its own warp's values: the clock acts on it."""

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
    """All warps of a named barrier wait for one another."""

    number: int
    threads: int | None  # None: all of the block


@dataclass(frozen=True, slots=True)
class BarrierArrive:
    """Counts for a named barrier without waiting."""

    number: int
    threads: int | None


@dataclass(frozen=True, slots=True)
class InitMbarrier:
    address: int | None  # in shared memory
    count: int | None  # of arrivals that end a phase


@dataclass(frozen=True, slots=True)
class Arrive:
    address: int | None
    count: int
    expected_bytes: int  # that copies are to bring before the phase ends
    remote: bool = False  # at a barrier of a cluster, wherever it lies


@dataclass(frozen=True, slots=True)
class AwaitPhase:
    """The warp goes on when the phase of this parity is over."""

    address: int | None
    parity: int | None


@dataclass(frozen=True, slots=True)
class Copy:
    """A box from global to shared memory."""

    descriptor: int | None  # offset of the parameter in constant bank 0
    shared: int | None
    mbarrier: int | None
    coordinates: tuple[int | None, ...]  # innermost first
    blocks: int | None = 1  # of a cluster, into which it is copied


@dataclass(frozen=True, slots=True)
class Put:
    """A box from shared to global memory."""

    descriptor: int | None
    reduce: bool
    coordinates: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Global:
    bytes: int  # of all active lanes
    sectors: int  # of 32 bytes; where an address is unknown, as many as the bytes fill
    store: bool
    shared: bool  # into shared memory, past the registers
    exact: bool = True  # the addresses are known


@dataclass(frozen=True, slots=True)
class Local:
    """A spilled register, or a part of the stack."""

    bytes: int
    store: bool


@dataclass(frozen=True, slots=True)
class SetRegisters:
    count: int  # a thread
    acquire: bool


Effect = (
    Jump
    | Exit
    | BarrierSync
    | BarrierArrive
    | InitMbarrier
    | Arrive
    | AwaitPhase
    | Copy
    | Put
    | Global
    | Local
    | SetRegisters
)
