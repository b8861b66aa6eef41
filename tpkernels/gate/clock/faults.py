"""What must not happen while machine code runs: a mistake of the kernel, or of how we read it."""

from __future__ import annotations


class ClockFault(RuntimeError):
    """The clock cannot go on; the message says which warp, where, why."""


class NeverEnds(ClockFault):
    """More instructions than the budget, or a path that leaves the code without EXIT."""


class Deadlock(ClockFault):
    """All warps that are left wait for each other."""


class ScoreboardNeverSet(ClockFault):
    """A wait for a scoreboard that no instruction before it uses."""


class MbarrierNotMade(ClockFault):
    """An mbarrier is used that was not initialised, or no longer is one."""


class UnexpectedBytes(ClockFault):
    """A copy completes more bytes on an mbarrier than its phase expects."""


class TooManyArrivals(ClockFault):
    """An mbarrier gets more arrivals than its phase awaits."""


class UnknownPlace(ClockFault):
    """An mbarrier's address, count or parity that the machine code does not let us know."""


class UnknownTrips(ClockFault):
    """A loop goes on as long as data says, and the launch does not say what the data is."""


class TooFast(ClockFault):
    """A time in which memory could not move the bytes of the launch."""


class UnknownBox(ClockFault):
    """Neither the code nor the launch says how many bytes a copy moves."""


class UnfitRegisters(ClockFault):
    """A warp gives registers back that it does not have, or takes them without asking."""
