"""The calls of one exchange, in the order that all ranks make them in; when a slot is free without asking.

A rank that pushes rows of call e into a slot of another must know that the other has read call e - 2 there.
It knows where

    1. it had itself read call e - 1 before it began call e, and
    2. the other had read call e - 2 before it began call e - 1.

For it has then seen the flags of call e - 1 from the other, which raised them after it had begun that call,
hence after it had read call e - 2. Reading a call means waiting for the flags of all ranks, so that this
holds for every pair: nobody has to ask. All ranks make the same calls, and read them, in the same order:
both conditions hold on all ranks or on none.

Otherwise a call needs a barrier of all ranks before the first of its rows is pushed. What each rank
enqueued before it began call e is then done everywhere, reading call e - 2 among it. A call that nobody
reads is such a case: call e + 1 has a barrier, and call e + 2 is refused.

tests/comm/test_order.py tries every order of events in small cases, also without the barrier.
"""

from __future__ import annotations

from tpkernels.comm.schedule import SLOTS, reusable_after


class CallOrder:
    """Tracks which calls of an exchange have begun, and which have been read."""

    def __init__(self) -> None:
        self.begun = 0  # the last call that has begun
        self.read = 0  # the last one up to which all have been read
        self._read_ahead: set[int] = set()
        self._follows = True  # whether the one before the last call had been read when that one began

    def refusal(self) -> str:
        """Return why the next call may not begin, or an empty text."""
        epoch = self.begun + 1
        if self.read >= reusable_after(epoch):
            return ""
        return (
            f"expected call {reusable_after(epoch)} to be released before call {epoch} begins; has an error "
            "ended it? Then destroy the process group"
        )

    def begin(self) -> tuple[int, bool]:
        """Begin the next call: return its number, and whether a barrier must precede its first push."""
        followed, self._follows = self._follows, self.read == self.begun
        self.begun += 1
        return self.begun, self.begun > SLOTS and not (followed and self._follows)

    def released(self, epoch: int) -> None:
        """Mark call `epoch` as read; an earlier call may still be in use."""
        if epoch == self.read + 1 and not self._read_ahead:  # the usual case
            self.read = epoch
            return
        self._read_ahead.add(epoch)
        while self.read + 1 in self._read_ahead:
            self.read += 1
            self._read_ahead.remove(self.read)
