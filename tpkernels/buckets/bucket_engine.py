"""csrc/bucket_engine.cpp in Python, for where the extension is absent: same order of launches, same texts.

A round goes from `zero` (or the first gradient after `finish`) to `finish`. In a round each parameter's hook
takes its gradient into the bucket; the hook that completes a bucket launches the collective; `finish`
launches the rest and waits. Until `expect` says how many gradients come, nothing is launched before `finish`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp
from torch.profiler import record_function

from tpkernels.buckets.engine import EngineOptions
from tpkernels.buckets.state import Bucket, Slot, accumulator_of
from tpkernels.comm.groups import LiveGroup, start_all_reduce, start_reduce_scatter
from tpkernels.comm.side_stream import SideStream


class BucketEngine:
    """See `tpkernels.buckets.engine.Engine`."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        names: Sequence[str],
        marked: Sequence[bool],
        options: EngineOptions,
    ) -> None:
        self._options = options
        self._group = options.group
        self._tensor_parallel_group = options.tensor_parallel_group
        device = parameters[0].device
        self._side = SideStream(device)
        self._in_backend = self._group.averages(device)  # and adds halves in float32; gloo does neither
        self._divisor = options.group.size
        self._divides = options.average and self._divisor > 1 and not self._in_backend  # before sending
        self._reduction = ReduceOp.AVG if options.average and not self._divides else ReduceOp.SUM
        self._lock = threading.Lock()  # autograd runs hooks in its own threads
        self._buckets: list[Bucket] = []
        self._learning = self._synchronizing = True
        self._finished = False
        self._refused = False  # by all ranks, for what one has found
        self._next = self._clock = self._launched_in_backward = 0
        self._slots = [
            Slot(parameter, name, is_marked, accumulator_of(parameter), parameter.dtype)
            for parameter, name, is_marked in zip(parameters, names, marked, strict=True)
        ]
        self._hooks = [slot.accumulator.register_hook(self._hook(slot)) for slot in self._slots]

    def detach(self) -> None:
        for hook in self._hooks:
            hook.remove()
        with self._lock:
            self._abandon()

    def arrange(self, bucket_of: list[int], offset_of: list[int], elements: list[int], /) -> None:
        with self._lock, torch.no_grad():
            # Memory of old buckets is held by their views, and goes with the last of them.
            self._buckets.clear()
            members: list[list[Slot]] = [[] for _ in elements]
            for slot, bucket in zip(self._slots, bucket_of, strict=True):
                members[bucket].append(slot)
            offset = dict(zip(self._slots, offset_of, strict=True))
            for number, (slots, size) in enumerate(zip(members, elements, strict=True)):
                first = slots[0].parameter
                flat = torch.zeros(size, dtype=self._options.grad_dtype or first.dtype, device=first.device)
                self._buckets.append(Bucket(flat, slots))
                for slot in slots:
                    slot.move_to(flat, offset[slot])
                    slot.bucket = number

    def expect(self, arrivals: list[int], /) -> None:
        with self._lock:
            for slot, count in zip(self._slots, arrivals, strict=True):
                slot.expected = count
            self._learning = False

    def _hook(self, slot: Slot) -> Callable[..., None]:
        engine = weakref.ref(self)  # the hook is held by autograd, where no garbage collector looks

        def on_gradient(*_: Any) -> None:
            if alive := engine():
                with alive._lock, torch.no_grad():
                    alive._on_gradient(slot)

        return on_gradient

    def _on_gradient(self, slot: Slot) -> None:
        if self._finished:
            self._begin_round()
        self._refuse_late(slot)
        self._take_in(slot)
        slot.touched = True
        bucket = self._buckets[slot.bucket]
        self._side.note_current(bucket.streams)
        if not self._synchronizing:
            return
        slot.arrived += 1
        self._clock += 1
        slot.last_arrival = self._clock
        if self._learning or slot.arrived < slot.expected:
            return
        bucket.pending -= 1
        while self._next < len(self._buckets) and self._buckets[self._next].pending == 0:
            self._launch()
            self._launched_in_backward += 1

    def _take_in(self, slot: Slot) -> None:
        """A gradient of a backward into its place in the bucket."""
        grad = slot.parameter.grad
        if grad is None:  # nothing came, or a fused kernel has added it to the bucket already
            return
        if grad.layout != torch.strided:
            raise TypeError(
                f"GradientBuckets: the gradient of '{slot.name}' is sparse; expected a dense one: make its "
                "embedding with sparse=False"
            )
        if grad.requires_grad:
            raise RuntimeError(
                f"GradientBuckets: the gradient of '{slot.name}' has a graph of its own; "
                "backward(create_graph=True) is not supported, use torch.autograd.grad"
            )
        slot.refuse_resized(grad)
        if self._options.main_grad:
            self._refuse_reduced(slot)
            slot.place.add_(grad)
            slot.parameter.grad = None
        elif slot.is_in_place(grad):
            self._refuse_reduced(slot)
        else:
            # The first gradient after `zero` is written, not added: that reads and writes half as much, and
            # can divide on the way.
            slot.scaled = self._divides and self._synchronizing and slot.expected == 1
            if slot.scaled:
                torch.div(grad, self._divisor, out=slot.place)
            else:
                slot.place.copy_(grad)
            slot.parameter.grad = slot.alias()
            slot.reduced = False

    def _take_leftover(self, slot: Slot) -> None:
        """What lies in `grad` when the bucket is sent, where no hook took it in during this round."""
        if self._options.main_grad:
            return
        grad = slot.parameter.grad
        if grad is not None and slot.is_in_place(grad):
            if not slot.touched:
                self._refuse_reduced(slot)
            return
        if grad is None:
            slot.place.zero_()
        else:
            slot.refuse_resized(grad)
            slot.place.copy_(grad)
        slot.parameter.grad = slot.alias()

    def _refuse_late(self, slot: Slot) -> None:
        if not self._learning and (slot.bucket < self._next or slot.arrived >= slot.expected):
            raise RuntimeError(
                f"GradientBuckets: '{slot.name}' received gradient {slot.arrived + 1} of this step, but "
                f"{slot.expected} had been expected, as in the first step, and may be on its way; run all "
                "backwards but the last under no_sync(), then finish()"
            )

    def _refuse_reduced(self, slot: Slot) -> None:
        keeps_average = self._options.average and not self._options.reduce_scatter
        if slot.reduced and not keeps_average:
            raise RuntimeError(
                f"GradientBuckets: the gradient of '{slot.name}' is reduced already, and more cannot be "
                "added to it; call zero() first"
            )

    def _begin_round(self) -> None:
        for slot in self._slots:
            slot.touched = slot.scaled = False
            slot.arrived = slot.last_arrival = 0
        for bucket in self._buckets:
            bucket.pending = len(bucket.members)
            bucket.streams.clear()
        self._next = self._clock = self._launched_in_backward = 0
        self._finished = self._refused = False

    def zero(self) -> bool:
        with self._lock, torch.no_grad():
            self._group.get()
            interrupted = not self._finished and any(slot.arrived for slot in self._slots)
            if interrupted and self._refused:
                self._abandon()  # as all ranks do
            elif interrupted:
                self._give_up()
            for slot in self._slots:
                slot.reduced = False
                if not self._options.main_grad:
                    slot.parameter.grad = None
            if self._options.main_grad or interrupted:
                for bucket in self._buckets:
                    bucket.flat.zero_()
            self._begin_round()
            return interrupted

    def _give_up(self) -> None:
        """This rank stops in the middle (an exception in backward, say). Ranks that did not wait for its
        buckets: they get them, but as NaN, so that nobody takes a part of the sum for the whole, or are told
        before they send."""
        left = self._buckets[self._next :]
        try:
            if self._options.check_nan and left:
                self._objection_of_any(left[0], self._objection(len(self._slots)))
                self._abandon()
                return
            for bucket in left:
                bucket.flat.fill_(torch.nan)
                self._start(bucket)
            self._complete()
        except BaseException:
            self._abandon()
            raise

    def finish(self) -> list[int]:
        with self._lock, torch.no_grad():
            self._group.get()
            for slot in self._slots:
                slot.refuse_converted()
            if not self._finished:
                try:
                    while self._next < len(self._buckets):
                        self._launch()
                    self._complete()
                except BaseException:
                    self._abandon()
                    raise
                for slot in self._slots:
                    slot.reduced = True
                self._finished = True
            return [index for index, slot in enumerate(self._slots) if not slot.touched]

    def set_synchronizing(self, synchronizing: bool, /) -> None:
        self._synchronizing = synchronizing

    def _launch(self) -> None:
        """Send the next bucket."""
        bucket = self._buckets[self._next]
        with record_function(f"tpkernels: {self._describe(bucket)}"):
            self._group.get()
            for slot in bucket.members:
                self._take_leftover(slot)
            if self._options.check_nan:
                self._refuse_nan(bucket)
            self._scale(bucket)
            self._start(bucket)
        self._next += 1

    def _start(self, bucket: Bucket) -> None:
        """Marked buckets go through the tensor-parallel group first; `_send_on` sends them on."""
        self._side.note_current(bucket.streams)
        self._side.wait_for(bucket.streams)
        with self._side.entered():
            self._send_on()
            bucket.wire = bucket.flat.to(self._wire_dtype(bucket.flat.dtype))
            bucket.half_way = bucket.marked
            if bucket.half_way:
                assert self._tensor_parallel_group is not None
                group = self._tensor_parallel_group.get()
                bucket.work = start_all_reduce(group, bucket.wire, ReduceOp.SUM, self._options.timeout)
            else:
                self._reduce(bucket)

    def _wire_dtype(self, own: torch.dtype) -> torch.dtype:
        """gloo adds in the dtype that it is given, and 256 + 1 is 256 in bfloat16."""
        is_half = own in (torch.bfloat16, torch.float16)
        return self._options.wire_dtype or (torch.float32 if is_half and not self._in_backend else own)

    def _reduce(self, bucket: Bucket) -> None:
        group, timeout = self._group.get(), self._options.timeout
        assert bucket.wire is not None
        if self._options.reduce_scatter:
            shard = bucket.wire.chunk(group.size())[group.rank()]
            bucket.work = start_reduce_scatter(group, shard, bucket.wire, self._reduction, timeout)
        else:
            bucket.work = start_all_reduce(group, bucket.wire, self._reduction, timeout)

    def _send_on(self) -> None:
        """Marked buckets into their second group. At the next launch, not when the first sum happens to be
        there: all ranks start collectives in one order, and what the host waits for had a bucket's time."""
        for bucket in self._buckets:
            if bucket.half_way:
                assert self._tensor_parallel_group is not None
                bucket.half_way = False
                self._await(bucket, self._tensor_parallel_group, "all_reduce")
                self._reduce(bucket)

    def _complete(self) -> None:
        """Wait for all buckets: the host on a CPU, the current stream elsewhere."""
        with self._side.entered():
            self._send_on()
            for bucket in self._buckets:
                operation = "reduce_scatter" if self._options.reduce_scatter else "all_reduce"
                self._await(bucket, self._group, operation)
                if bucket.wire is not None and bucket.wire is not bucket.flat:
                    bucket.flat.copy_(bucket.wire)
                bucket.wire = None
        self._side.let_current_wait()

    def _await(self, bucket: Bucket, group: LiveGroup, operation: str) -> None:
        work, bucket.work = bucket.work, None
        if work is None:
            raise RuntimeError(f"GradientBuckets: {operation} of {self._describe(bucket)} has failed already")
        try:
            work.wait()
        except RuntimeError as error:
            raise RuntimeError(
                f"GradientBuckets: {operation} of {self._describe(bucket)} failed in process group "
                f"'{group.name}' of {group.size} ranks, here on rank {self._options.rank}; a rank "
                f"died, came too late, or left the common order of calls. Cause: {error}"
            ) from error

    def _abandon(self) -> None:
        """Nothing stays in flight, for memory that is sent must not be written or freed."""
        for bucket in self._buckets:
            work, bucket.work = bucket.work, None
            with suppress(RuntimeError):  # one failure has been reported; others follow from it
                if work is not None:
                    work.wait()
            bucket.wire = None
            bucket.half_way = False
        self._finished = True

    def _scale(self, bucket: Bucket) -> None:
        if not self._divides:
            return
        if not any(slot.scaled for slot in bucket.members):
            bucket.flat.div_(self._divisor)
            return
        for slot in bucket.members:
            if not slot.scaled:
                slot.place.div_(self._divisor)

    def _objection(self, index: int) -> int:
        """Rank and parameter, both from 1."""
        return (self._options.rank + 1) << 32 | (index + 1)

    def _objection_of_any(self, bucket: Bucket, own: int) -> int:
        """All ranks learn of an objection by any of them, so that all refuse to send the bucket."""
        anywhere = torch.full((1,), own, dtype=torch.int64, device=bucket.flat.device)
        if bucket.marked:
            assert self._tensor_parallel_group is not None
            group = self._tensor_parallel_group.get()
            start_all_reduce(group, anywhere, ReduceOp.MAX, self._options.timeout).wait()
        start_all_reduce(self._group.get(), anywhere, ReduceOp.MAX, self._options.timeout).wait()
        return int(anywhere.item())

    def _refuse_nan(self, bucket: Bucket) -> None:
        if self._refused:
            raise RuntimeError("GradientBuckets: this step has been refused; call zero()")
        own = 0
        for index, slot in enumerate(self._slots):
            if slot in bucket.members and bool(slot.place.isnan().any()):
                own = self._objection(index)
        found = self._objection_of_any(bucket, own)
        self._refused = bool(found)
        rank, parameter = (found >> 32) - 1, found & 0xFFFFFFFF
        if parameter > len(self._slots):
            raise RuntimeError(
                f"GradientBuckets: rank {rank} has given up this step, by an exception in backward, say; "
                f"{self._describe(bucket)} was not sent"
            )
        if found:
            name = self._slots[parameter - 1].name
            raise RuntimeError(
                f"GradientBuckets: on rank {rank} the gradient of '{name}' holds NaN; "
                f"{self._describe(bucket)} was not sent"
            )

    def _describe(self, bucket: Bucket) -> str:
        number = self._buckets.index(bucket)
        first, last = bucket.members[0].name, bucket.members[-1].name
        return f"bucket {number} of {len(self._buckets)} ('{first}' to '{last}', {bucket.flat.nbytes} bytes)"

    def buckets(self) -> list[Tensor]:
        return [bucket.flat for bucket in self._buckets]

    def views(self) -> list[Tensor]:
        return [slot.place for slot in self._slots]

    def arrivals(self) -> list[int]:
        return [slot.arrived for slot in self._slots]

    def last_arrivals(self) -> list[int]:
        return [slot.last_arrival for slot in self._slots]

    def launched_in_backward(self) -> int:
        return self._launched_in_backward
