"""The mbarriers of a block: arrivals, bytes and phases, by address in shared memory."""

from __future__ import annotations

from tpkernels.gate.clock.faults import MbarrierNotMade, TooManyArrivals, UnexpectedBytes, UnknownPlace


class Mbarrier:
    """Phase n is over once `count` arrivals came, and all bytes that they expect."""

    def __init__(self, address: int, count: int) -> None:
        self.address, self.count = address, count
        self.pending = count
        self.bytes = 0  # expected and not here yet
        self.phase = 0  # phases that are over
        self.copied = -1.0  # when the copy was issued that ended the last phase; -1: an arrival ended it

    def over(self, parity: int) -> bool:
        """Is the phase of this parity over? A fresh mbarrier says so of parity 1."""
        return self.phase & 1 != parity

    def arrive(self, count: int, expected: int) -> bool:
        """Whether this ends the phase."""
        if count > self.pending:
            raise TooManyArrivals(f"{count} more arrivals at {self}")
        self.pending -= count
        self.bytes += expected
        return self._end(-1.0)

    def complete(self, arrived: int, issued: float) -> bool:
        """Bytes of a copy that was issued then; whether they end the phase."""
        if arrived > self.bytes:
            raise UnexpectedBytes(f"a copy brings {arrived} bytes to {self}")
        self.bytes -= arrived
        return self._end(issued)

    def _end(self, issued: float) -> bool:
        if self.pending or self.bytes:
            return False
        self.phase += 1
        self.pending = self.count
        self.copied = issued
        return True

    def __str__(self) -> str:
        awaits = f"{self.pending} of {self.count} arrivals and {self.bytes} bytes"
        return f"mbarrier {self.address:#x}, whose phase {self.phase} awaits {awaits}"


class Mbarriers:
    def __init__(self) -> None:
        self._made: dict[int, Mbarrier] = {}

    def make(self, address: int | None, count: int | None) -> None:
        if address is None or count is None:
            raise UnknownPlace("an mbarrier is made of which address or count are unknown")
        self._made[address] = Mbarrier(address, count)

    def __getitem__(self, address: int | None) -> Mbarrier:
        if address is None:
            raise UnknownPlace("an mbarrier is used of which the address is unknown")
        if address not in self._made:
            made = ", ".join(f"{known:#x}" for known in sorted(self._made)) or "none"
            raise MbarrierNotMade(f"no mbarrier at {address:#x}; there are: {made}")
        return self._made[address]
