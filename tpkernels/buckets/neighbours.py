"""The ranks of this machine that add up buckets in shared memory with this one, and waits for them.

As in an exchange of rows (`comm.transports.host`), a wait can be interrupted. It checks now and then whether
the awaited processes still run, and fails the group if not, so that all ranks raise the first cause.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence

from tpkernels.buckets.engine import Engine, EngineOptions
from tpkernels.buckets.live_group import LiveGroup
from tpkernels.buckets.step import BucketStep
from tpkernels.comm.calls import Call, calls_of, handshake
from tpkernels.comm.groups import failed
from tpkernels.comm.transports.processes import LOOK_SECONDS, Process

OP = "GradientBuckets"
FAREWELL_SECONDS = 2.0  # as at the end of a process, see csrc/bucket_memory.cpp


class Neighbours:
    """The other ranks of one engine's groups, and the waits for them."""

    def __init__(
        self,
        engine: Engine,
        step: BucketStep,
        groups: Sequence[LiveGroup],
        processes: Sequence[Mapping[int, Process]],
        options: EngineOptions,
        timeout: float,
    ) -> None:
        """groups: the data-parallel one last, after the tensor-parallel one if its ranks add up, too

        processes: of the other ranks of each, by their number there
        timeout: seconds
        """
        self._engine, self._step, self._groups, self._processes = engine, step, groups, processes
        self._calls = [calls_of(group.get()) for group in groups]
        # its own call number distinguishes these buckets from others of the group
        self._numbers = [handshake(OP, "who add up buckets", group.get()).number for group in groups]
        self._refuses, self._timeout = options.check_nan, timeout
        self._opener = os.getpid()

    def finish(self) -> None:
        """Launch the remaining buckets and wait for their sums, so that `engine.finish` does not wait."""
        began = False
        try:
            began = self._engine.launch_rest()
        finally:  # buckets sent before the rest was refused are in flight
            self._settle(numbered=began)

    def zero(self) -> bool:
        """Interrupt a round and wait for its buckets in flight; return whether there was a round."""
        interrupted = False
        try:
            interrupted = self._engine.interrupt()
        finally:
            self._settle(numbered=interrupted)
        return interrupted

    def leave(self, patience: float | None = None) -> None:
        """Wait for buckets in flight, so that `engine.detach` does not; a timeout is no error.

        patience: seconds, if not the timeout of other waits
        """
        if os.getpid() != self._opener:
            return
        try:
            self._await(patience=patience)
        except RuntimeError:
            self._engine.lose_others()
        except BaseException as error:
            self._fail(error)
            raise

    def _settle(self, *, numbered: bool) -> None:
        """Wait until all buckets in flight have been summed.

        numbered: a round is complete on all ranks, and counts as a call of its groups
        """
        try:
            begun = []
            # a round refused for NaN ends in finish() on this rank, in zero() on others
            if numbered and not self._refuses:
                for group, number in zip(self._groups, self._numbers, strict=True):
                    what = f"gradients of a step, buckets of call {number}"
                    begun.append(handshake(OP, what, group.get()))
            self._await(begun)
        except BaseException as error:  # Ctrl-C, too: other ranks do not know of it
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        if os.getpid() == self._opener:  # a fork does not belong to the group
            self._engine.lose_others()
            self._step.fail(error)

    def _await(self, begun: Sequence[Call] = (), patience: float | None = None) -> None:
        """Wait for buckets in flight. begun: the calls of the step, which other ranks must be in, too"""
        started, patience = time.monotonic(), self._timeout if patience is None else patience
        while not self._engine.settle(LOOK_SECONDS):
            what, tensor_parallel, late, left = self._engine.awaited()
            which = 0 if tensor_parallel else -1
            cause = self._cause(self._processes[which], late, left, time.monotonic() - started, patience)
            if cause and not self._engine.settle(0.0):  # their work before they ended counts
                group = self._groups[which]
                raise failed(f"{OP}: {what}", group.name, group.size, cause)
            for call in begun:
                call.calls.compare(call)

    def _cause(
        self,
        processes: Mapping[int, Process],
        late: Sequence[int],
        left: Sequence[int],
        seconds: float,
        patience: float,
    ) -> str:
        """Return why a wait must raise: a failure, an ended process, a timeout; "" if none."""
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
