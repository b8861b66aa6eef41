"""What can be wrong with a warp-specialised kernel."""

from __future__ import annotations


class Fault(Exception):
    """A kernel does what it must not; `path` says by which steps it came there."""

    path: tuple[str, ...] = ()

    def __str__(self) -> str:
        steps = "".join(f"\n  {step}" for step in self.path[-12:])
        return super().__str__() + (f"\nafter{steps}" if steps else "")


class Deadlock(Fault):
    """Nobody can go on."""


class Race(Fault):
    """Something is read or overwritten without being ordered after what must come before."""


class Misuse(Fault):
    """A barrier, a buffer or an address is not used as it may be."""


class Undrained(Fault):
    """Something is still in flight, or half done, at the end."""
