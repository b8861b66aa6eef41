"""Ranks of this machine that add up buckets with us in shared memory, and how we wait for them.

As in an exchange of rows (`comm.transports.host`): who waits can be interrupted, looks now and then whether
those it waits for still run, and lets the group fail if not, so that all ranks learn of the first cause.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence

from tpkernels.buckets.engine import Engine, EngineOptions
from tpkernels.comm.calls import Call, calls_of, handshake
from tpkernels.comm.groups import LiveGroup, failed
from tpkernels.comm.transports.processes import LOOK_SECONDS, Process
from tpkernels.messages import cause_of

OP = "GradientBuckets"
FAREWELL_SECONDS = 2.0  # as at the end of a process, see csrc/bucket_memory.cpp


class Neighbours:
    """The other ranks of one engine's groups."""

    def __init__(
        self,
        engine: Engine,
        groups: Sequence[LiveGroup],
        processes: Sequence[Mapping[int, Process]],
        options: EngineOptions,
        timeout: float,
    ) -> None:
        """groups: the data-parallel one last, after the tensor-parallel one if its ranks add up, too

        processes: of the other ranks of each, by their number there
        timeout: seconds
        """
        self._engine, self._groups, self._processes = engine, groups, processes
        self._calls = [calls_of(group.get()) for group in groups]
        # of a call of its own, which tells these buckets from others of the group
        self._numbers = [handshake(OP, "who add up buckets", group.get()).number for group in groups]
        self._refuses, self._timeout = options.check_nan, timeout
        self._opener = os.getpid()

    def finish(self) -> None:
        """All that `engine.finish` would wait for."""
        self._require_usable()
        began = False
        try:
            began = self._engine.launch_rest()
        finally:  # what was sent before the rest was refused is on its way
            self._settle(numbered=began)

    def zero(self) -> bool:
        """All that `engine.zero` would wait for; whether it ends a round."""
        self._require_usable()
        interrupted = False
        try:
            interrupted = self._engine.interrupt()
        finally:
            self._settle(numbered=interrupted)
        return interrupted

    def leave(self, patience: float | None = None) -> None:
        """All that `engine.detach` would wait for; nobody is told if it does not come.

        patience: seconds, if not as long as elsewhere
        """
        if os.getpid() != self._opener:
            return
        try:
            self._await(patience)
        except RuntimeError:
            self._engine.lose_others()
        except BaseException as error:
            self._fail(error)
            raise

    def _require_usable(self) -> None:
        """A group that has failed takes the others with it: their ranks would wait for us."""
        try:
            for group in self._groups:
                group.get()
        except RuntimeError as error:
            self._fail(error)
            raise

    def _settle(self, *, numbered: bool) -> None:
        """Wait until all that is on its way has been added up.

        numbered: all of a round is, on all ranks: a call of its groups
        """
        wait: Callable[[], None] = self._await
        try:
            # a round that is refused for NaN ends in finish() here, in zero() there
            if numbered and not self._refuses:
                for group, number in zip(self._groups, self._numbers, strict=True):
                    what = f"gradients of a step, buckets of call {number}"
                    wait = _watched(handshake(OP, what, group.get()), wait)
            wait()
        except BaseException as error:  # Ctrl-C, too: the others do not know
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        if os.getpid() != self._opener:  # a fork has no part in the group, nor in its store
            return
        self._engine.lose_others()
        for calls in self._calls:
            calls.fail(f"{type(error).__name__}: {cause_of(error)}")

    def _await(self, patience: float | None = None) -> None:
        started, patience = time.monotonic(), self._timeout if patience is None else patience
        while not self._engine.settle(LOOK_SECONDS):
            what, tensor_parallel, late, left = self._engine.awaited()
            which = 0 if tensor_parallel else -1
            cause = self._cause(self._processes[which], late, left, time.monotonic() - started, patience)
            if cause and not self._engine.settle(0.0):  # what they did before they ended counts
                group = self._groups[which]
                raise failed(f"{OP}: {what}", group.name, group.size, cause)

    def _cause(
        self,
        processes: Mapping[int, Process],
        late: Sequence[int],
        left: Sequence[int],
        seconds: float,
        patience: float,
    ) -> str:
        """Why not to wait any longer; nothing if there is no reason."""
        for calls in self._calls:
            if first := calls.first_failure():
                return first
        for rank in late:
            if rank in left:
                return f"rank {rank} of it has let go of its GradientBuckets"
            if rank in processes and processes[rank].has_ended():
                return f"the process of rank {rank} of it has ended"
        if seconds > patience:
            ranks = ", ".join(map(str, late))
            return f"the wait for rank{'s' * (len(late) > 1)} {ranks} of it timed out after {seconds:.1f} s"
        return ""


def _watched(call: Call, wait: Callable[[], None]) -> Callable[[], None]:
    return lambda: call.wait_for(wait)
