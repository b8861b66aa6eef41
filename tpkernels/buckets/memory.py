"""Allocates buckets, in memory of this process or in memory that ranks of one machine share and reduce in.

In shared memory each rank adds up its shard of all ranks' gradients, and writes the sum for all to read
(csrc/shared_sums.h). Buckets on the CPU share memory if the ranks of the group are on one machine, or equally
many on each of several. A tensor-parallel group that sums some buckets first must be on one machine.
TPKERNELS_TRANSPORT=c10d keeps memory apart. The log shows the choice.

machine    one              other
ranks      0  1  2          3  4  5
owners     0 and 3, 1 and 4, 2 and 5: each adds up one shard, first over its machine, then with the other
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from tpkernels import tp_invariance
from tpkernels.buckets.engine import LONGEST_TIMEOUT, Engine, EngineOptions
from tpkernels.buckets.forks import copy_in_forks
from tpkernels.buckets.live_group import LiveGroup
from tpkernels.buckets.neighbours import OP, Neighbours
from tpkernels.buckets.step import BucketStep
from tpkernels.comm.agreement import CannotTakePart, offers_of_all
from tpkernels.comm.calls import handshake
from tpkernels.comm.groups import timeout_of
from tpkernels.comm.transports import processes, select
from tpkernels.comm.transports.mailbox import Meeting
from tpkernels.comm.transports.processes import Process, process_of
from tpkernels.comm.transports.shared import Mapped, mapped_by_all, new_memory
from tpkernels.groups import c10d

CPU = torch.device("cpu")
LINE_BYTES = 64  # of a cache
WORD_BYTES = 8
DOORBELL_WORDS = 2  # as in csrc/doorbell.h
BUCKET_WORDS = 2  # as in csrc/shared_sums.h


class Machines(NamedTuple):
    """The machines of a group, for one rank; ranks are numbered within the group."""

    members: list[int]  # on this machine, this rank among them
    owners: list[int]  # of the same shard, one on each machine; empty on one machine


def machines_of(places: Sequence[str], rank: int) -> tuple[str, Machines]:
    """Return why ranks at these places share no memory ("" if they do), and this rank's `Machines`.

    places: the machine of each rank

    >>> machines_of(["a", "a", "b", "b"], rank=1)[1]
    Machines(members=[0, 1], owners=[1, 3])
    >>> machines_of(["a", "a", "b"], rank=0)[0]
    'ranks are on 2 machines, not as many on each'
    """
    ranks_at = {place: [peer for peer, other in enumerate(places) if other == place] for place in places}
    members, counts = ranks_at[places[rank]], {len(ranks) for ranks in ranks_at.values()}
    if len(ranks_at) == 1:
        return "", Machines(members, [])
    if counts == {1}:
        return f"ranks are on {len(ranks_at)} machines, one on each", Machines(members, [])
    if len(counts) > 1:
        return f"ranks are on {len(ranks_at)} machines, not as many on each", Machines(members, [])
    number = members.index(rank)
    return "", Machines(members, sorted(ranks[number] for ranks in ranks_at.values()))


def group_across(group: ProcessGroup, owners: Sequence[int], timeout: float, number: int) -> ProcessGroup:
    """Make the process group of the owners of one shard. Called by all ranks of `group` at once.

    For one engine only: collectives match by their order, and the order of engines differs between ranks.
    number: of the call, to make the name unique
    """
    return c10d.new_group(
        tuple(dist.get_global_rank(group, owner) for owner in owners),
        name=f"{group.group_name}, owners {', '.join(map(str, owners))}, call {number}",
        description="tpkernels owners of a shard of gradient buckets",
        timeout=timedelta(seconds=timeout),
        backend="gloo",
        options=None,
    )


# by groups, that of ranks which may share memory: each rank of a group has it from the same call, or has not
_PLACES: WeakKeyDictionary[ProcessGroup, tuple[str, list[str]]] = WeakKeyDictionary()


def _where_ranks_run(group: ProcessGroup, why: str, here: str) -> tuple[str, list[str]]:
    """As `select.where_ranks_run`; ranks that may share memory ask once: they stay where they are."""
    asked, places = _PLACES.get(group, ("", []))
    if why or not places or asked != select.requested_transport:
        why, places = select.where_ranks_run(OP, group, why, here)
        if not why:
            _PLACES[group] = select.requested_transport, places
    return why, places


class Bucket(NamedTuple):
    """Size, dtype and kind of one bucket to allocate."""

    elements: int
    dtype: torch.dtype
    marked: bool  # summed over the tensor-parallel group first


class BucketMemory:
    """Allocates the buckets of one `GradientBuckets`; all ranks call its methods at once."""

    def __init__(
        self, options: EngineOptions, step: BucketStep, device: torch.device, *, marked: bool
    ) -> None:
        """Agree on whether to share memory. marked: the tensor-parallel group sums some buckets"""
        self._options, self._step, self._device, self._opener = options, step, device, os.getpid()
        self._groups = [options.group]
        if marked and options.tensor_parallel_group is not None:
            self._groups.insert(0, options.tensor_parallel_group)
        self._machines: dict[LiveGroup, Machines] = {}
        self._against = self._why_apart()
        self._noted = ""
        self._across: ProcessGroup | None = None  # the owners of this rank's shard on all machines
        self._neighbours: Neighbours | None = None  # ranks that add up with this one; None: the backend does

    def arrange(
        self, engine: Engine, bucket_of: list[int], offset_of: list[int], buckets: Sequence[Bucket]
    ) -> None:
        """Allocate `buckets` and give them to the engine, with those of the ranks that share memory."""
        shared = None if self._against else self._shared(buckets)
        self._note(buckets)
        if shared is None:
            refuse_backend(self._options.group.size, self._against)
            flats = [torch.zeros(own.elements, dtype=own.dtype, device=self._device) for own in buckets]
            engine.arrange(bucket_of, offset_of, flats)
            self._neighbours = None
            return
        layout, buffers, processes = shared
        across, seconds = self._group_across(), self._seconds()
        own = layout.visible(buffers[-1][self._options.group.rank], marked=False)
        engine.arrange(bucket_of, offset_of, own.flats)
        for group, of_ranks in zip(self._groups, buffers, strict=True):
            marked, (members, owners) = group is not self._options.group, self._machines[group]
            visible = [layout.visible(of_ranks[rank], marked=marked) for rank in members]
            engine.meet(
                marked,
                members,
                [seen.doorbell for seen in visible],
                [seen.words for seen in visible],
                [flat for seen in visible for flat in seen.flats],
                across if owners else "",
                owners,
                max(1, round(seconds * 1000)),
            )
        self._neighbours = Neighbours(engine, self._step, self._groups, processes, self._options, seconds)

    # The waits for ranks that add up with this one come before the engine's own.

    def finish(self) -> None:
        if self._neighbours is not None:
            self._neighbours.finish()

    def zero(self) -> bool:
        """Whether a round was interrupted."""
        return self._neighbours is not None and self._neighbours.zero()

    def leave(self, patience: float | None = None) -> None:
        """Wait for sums in flight. patience: seconds, if not the timeout of other waits"""
        if self._neighbours is not None:
            self._neighbours.leave(patience)

    def close(self) -> None:
        """Destroy the inter-node group; memory is freed with its last tensor."""
        if self._across is not None and self._opener == os.getpid():
            c10d.destroy_group(self._across)
        self._across = self._neighbours = None

    def _group_across(self) -> str:
        """Return the name of the inter-node group of owners, made at the first call; "" on one machine."""
        group = self._options.group.get()
        owners = self._machines[self._options.group].owners
        if not owners:
            return ""
        if self._across is None:
            number = handshake(OP, "a group of the owners of a shard", group).number
            self._across = group_across(group, owners, self._seconds(), number)
        return str(self._across.group_name)

    def _seconds(self) -> float:
        """Return the seconds that ranks wait for each other, by `timeout` or the group's own."""
        timeout = self._options.timeout
        seconds = timeout.total_seconds() if timeout else timeout_of(self._options.group.get(), CPU)
        return min(seconds, LONGEST_TIMEOUT.total_seconds() - 1)

    def _why_apart(self) -> str:
        """Return why ranks share no memory, the same on all ranks of both groups; "" if they do."""
        if select.requested_transport not in ("auto", "shared"):
            return f"TPKERNELS_TRANSPORT={select.requested_transport}"
        if self._device.type != "cpu":
            return f"they are on {self._device.type}"
        if self._options.group.size == 1:
            return "there is one rank"
        here, why = select.place() if select.requested_transport == "auto" else processes.machine(), ""
        for group in self._groups_in_relay_order():
            why, places = _where_ranks_run(group.get(), why, here)
            problem, self._machines[group] = machines_of(places, group.rank)
            if group is not self._options.group and len({*places}) > 1:
                problem = "tensor-parallel ranks are on several machines"
            why = why or problem
        if why and select.requested_transport == "shared":
            raise CannotTakePart(f"{OP}: TPKERNELS_TRANSPORT=shared: {why}")
        if not why and self._machines[self._options.group].owners:
            refuse_backend(self._options.group.size, "they are on several machines")
        return why

    def _groups_in_relay_order(self) -> list[LiveGroup]:
        """Return groups in the order in which a refusal of one rank reaches the ranks of all."""
        return [self._options.group, *self._groups[:-1], *self._groups[1:]]

    def _shared(self, buckets: Sequence[Bucket]) -> _MemoryOfGroups | None:
        """Map the memory of all ranks; if one cannot, return None on all, with the reason in `_against`."""
        layout, descriptor, problem = MemoryMap(buckets), -1, ""
        try:
            descriptor = new_memory("gradient buckets", layout.byte_count)
            own = mmap.mmap(descriptor, layout.byte_count)
            copy_in_forks(own, descriptor)
        except Exception as error:  # any error: the other ranks wait for this one's answer
            problem = f"{type(error).__name__}: {error}"
        found: dict[LiveGroup, _MappedRanks] = {}
        try:
            for group in self._groups_in_relay_order():
                count = layout.byte_count if group is self._options.group else layout.marked_byte_count
                meeting = Meeting("memory of gradient buckets", group.get(), op=OP)
                build = partial(_MappedRanks, group.rank, self._machines[group].members)
                try:
                    if group in found:  # a second time, for the other group's errors
                        offers_of_all(meeting.title, meeting.begin(), problem)
                        continue
                    found[group] = mapped_by_all(meeting, f"{count} bytes", count, problem, descriptor, build)
                except CannotTakePart as error:
                    problem = str(error)
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        if problem:
            if select.requested_transport == "shared":
                raise CannotTakePart(problem)
            self._against = problem
            return None
        buffers = [{**found[group].buffers, group.rank: own} for group in self._groups]
        return _MemoryOfGroups(layout, buffers, [found[group].processes for group in self._groups])

    def _note(self, buckets: Sequence[Bucket]) -> None:
        """Log the choice of memory when it changes, on CPUs."""
        where = "apart" if self._against else "shared"
        if where != self._noted and self._device.type != "cuda" and select.choices.isEnabledFor(logging.INFO):
            self._noted = where
            byte_count = sum(bucket.elements * bucket.dtype.itemsize for bucket in buckets)
            machines = len(self._machines[self._options.group].owners) if not self._against else 0
            there = f"on each of {machines} machines" if machines else "on one machine"
            why = self._against or f"{self._options.group.size // max(1, machines)} ranks are {there}"
            group = self._options.group
            select.choices.info(
                "gradient buckets, %.1f MB, process group '%s' of %d ranks: %s (%s)",
                byte_count / 1e6, group.name, group.size, where, why,
            )  # fmt: skip


class _MemoryOfGroups(NamedTuple):
    """Memory and processes of the ranks of each group, by rank; the data-parallel group is last."""

    layout: MemoryMap
    buffers: list[dict[int, mmap.mmap]]
    processes: list[dict[int, Process]]


class _MappedRanks:
    """Memory and processes of a group's ranks on this machine."""

    def __init__(self, rank: int, members: Sequence[int], mapped: Mapping[int, Mapped]) -> None:
        self.buffers = {peer: mapped[peer].buffer for peer in members}
        self.processes = {peer: process_of(mapped[peer].process) for peer in members if peer != rank}

    def close(self) -> None:
        """Do nothing: memory is freed with the last object that holds it."""


def refuse_backend(ranks: int, why: str) -> None:
    """Raise if TP-invariance forbids a backend's sums over `ranks` ranks. why: the backend adds"""
    if ranks > 2 and tp_invariance.default.segments:
        raise ValueError(
            f"GradientBuckets: expected 1 or 2 data-parallel ranks with TP-invariance, got {ranks} ({why}): "
            "with more, backends add a gradient in an order that depends on its offset in the bucket; "
            "ranks of one machine, which share memory, add in a fixed order"
        )


class VisibleMemory(NamedTuple):
    """Tensors in a rank's memory that the ranks of one group read."""

    doorbell: Tensor
    words: Tensor
    flats: list[Tensor]  # the marked, or all


class MemoryMap:
    """Byte offsets of doorbell, words and buckets in the memory that a rank shares.

    The part that tensor-parallel ranks read comes first: sizes of their other buckets differ.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = buckets
        self._offsets = [0] * len(buckets)
        self._marked = [number for number, bucket in enumerate(buckets) if bucket.marked]
        self.byte_count = 0
        self._take(DOORBELL_WORDS * WORD_BYTES)
        self._marked_words = self._take(len(self._marked) * BUCKET_WORDS * WORD_BYTES)
        self._place(marked=True)
        self.marked_byte_count = self.byte_count
        self._words = self._take(len(buckets) * BUCKET_WORDS * WORD_BYTES)
        self._place(marked=False)

    def visible(self, memory: mmap.mmap, *, marked: bool) -> VisibleMemory:
        """Return tensors in a rank's memory that tensor-parallel (`marked`) or data-parallel ranks read."""
        numbers = self._marked if marked else range(len(self._buckets))
        words, bucket_words = self._marked_words if marked else self._words, BUCKET_WORDS * len(numbers)
        wanted = [(*self._buckets[number][:2], self._offsets[number]) for number in numbers]
        return VisibleMemory(
            _view(memory, DOORBELL_WORDS, torch.int64, 0),
            _view(memory, bucket_words, torch.int64, words),
            [_view(memory, elements, dtype, offset) for elements, dtype, offset in wanted],
        )

    def _place(self, *, marked: bool) -> None:
        for number, bucket in enumerate(self._buckets):
            if bucket.marked == marked:
                self._offsets[number] = self._take(bucket.elements * bucket.dtype.itemsize)

    def _take(self, count: int) -> int:
        offset = self.byte_count
        self.byte_count += -(-count // LINE_BYTES) * LINE_BYTES
        return offset


def _view(memory: mmap.mmap, count: int, dtype: torch.dtype, offset: int) -> Tensor:
    """Return a flat tensor on `memory`; its storage keeps `memory` alive."""
    if count == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset)
