"""Buckets in memory registered with NCCL, if reductions in it are at least as fast as in plain memory.

All ranks of a group choose alike: NCCL takes registered memory of all ranks, or of none. So each rank tries,
and ranks exchange their results, before a collective touches the memory. The first buckets of a size class
are then timed in both memories, and the slowest rank of each decides. The choice holds for this group and
process; a line on the logger "tpkernels.choices" reports it.

NCCL reads and writes registered memory without copies into its own buffers. A pool has NCCL's allocator
(`ncclMemAlloc`), tensors are made in it, and then its segments are registered with the group's communicator
(`ncclCommRegister`), without communication. Requirements of NCCL and torch:

- If one rank sends from registered memory, all must, at one offset of their segments; else results are wrong.
- A segment must be deregistered before it is freed: NCCL would take later memory at its address for it.
- A communicator that has ended has no segments any more, and must not be asked.

Symmetric windows (`register_mem_pool(pool, symm=True)`, NCCL 2.27) are not used. Registering one is a
collective, which hangs if another rank has failed. Some versions of torch register segments in the order of
their addresses, which differ between ranks, and abort the process with a communicator that has windows.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp
from torch.multiprocessing.reductions import StorageWeakRef

from tpkernels.comm.agreement import CannotTakePart, offers_of_all
from tpkernels.comm.calls import handshake, is_alive
from tpkernels.comm.groups import start_all_reduce, start_reduce_scatter
from tpkernels.comm.transports import select
from tpkernels.tp_invariance import mode

Collective = Literal["all_reduce", "reduce_scatter"]

WARM_UPS, ROUNDS = 3, 8  # the first calls connect ranks, and exchange handles of registered memory

_OP = "registered memory of gradient buckets"
CALLS = "mem_allocator", "register_mem_pool", "deregister_mem_pool"  # of torch's ProcessGroupNCCL


class SizeClass(NamedTuple):
    """Buckets that share one choice of memory, timed with the first of them."""

    collective: Collective
    dtype: torch.dtype
    size: int  # bytes of the largest bucket, up to a power of two


# Under None whether a group can have registered memory at all, under a key whether its buckets use it.
_chosen: WeakKeyDictionary[ProcessGroup, dict[SizeClass | None, bool]] = WeakKeyDictionary()
_held: list[NcclMemory] = []  # until no tensor uses it


def registered_zeros(
    group: ProcessGroup,
    elements: Sequence[int],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    collective: Collective,
) -> list[Tensor] | None:
    """Return a flat tensor of zeros for each bucket; None, on all ranks alike, to use plain memory.

    Called by all ranks of the group at once with equal arguments; they must send these tensors, not copies.
    """
    give_back_unused()
    if not elements or group.size() == 1 or not may_serve(device):
        return None
    sizes = [count * dtype.itemsize for count, dtype in zip(elements, dtypes, strict=True)]
    largest = sizes.index(max(sizes))
    key = SizeClass(collective, dtypes[largest], 1 << (sizes[largest] - 1).bit_length())
    known = _chosen.setdefault(group, {})
    if not known.get(None, True) or not known.get(key, True):
        return None
    try:
        if None not in known:
            known[None] = False
            connected_by_all(group, device)
            registered_by_all(group, [1], [torch.uint8], device)  # if this fails, little memory stays taken
            give_back_unused()
            known[None] = True
        if known.get(key):
            return registered_by_all(group, elements, dtypes, device)[0]
        known[key] = False
        flats, plain = registered_by_all(group, elements, dtypes, device, beside=largest)
    except CannotTakePart as error:  # on all ranks alike
        known[key] = False
        _say(group, key, f"plain memory ({error})")
        return None
    ours, theirs = slowest(group, [flats[largest], *plain], collective)
    known[key] = ours <= theirs
    memory = "registered" if known[key] else "plain"
    _say(group, key, f"{memory} memory (registered {ours:.3g} ms, plain {theirs:.3g} ms)")
    if known[key]:
        return flats
    flats.clear()
    give_back_unused()
    return None


def give_back_unused() -> None:
    """Free registered memory without tensors.

    Called before each step, for example; not when a tensor is freed, which happens anywhere, in any thread.
    Work in flight holds tensors a little longer than its caller.
    """
    _held[:] = [memory for memory in _held if memory.in_use() or not memory.end()]


def connected_by_all(group: ProcessGroup, device: torch.device) -> None:
    """Connect the communicator if all ranks want registered memory; else raise CannotTakePart on all."""
    try:
        problem = why_not(group, device)
    except Exception as error:  # any error: the other ranks wait for this one's answer
        problem = f"{type(error).__name__}: {error}"
    offers_of_all(_name(group), handshake(_OP, "who wants it", group), problem)
    start_all_reduce(group, torch.zeros(1, device=device), ReduceOp.SUM, None).wait()


def registered_by_all(
    group: ProcessGroup,
    elements: Sequence[int],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    beside: int | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Allocate and register a tensor for each bucket, and a plain tensor to compare with one of them.

    beside: number of this bucket; None: no plain tensor

    Raises CannotTakePart on all ranks if one fails.
    """
    flats: list[Tensor] = []
    plain: list[Tensor] = []
    problem = layout = ""
    try:
        memory = NcclMemory(group, device)
        _held.append(memory)
        flats = memory.zeros(elements, dtypes)
        memory.register()
        layout = memory.layout(flats)
        if beside is not None:  # now: no rank may fail between two collectives
            plain = [torch.zeros_like(flats[beside])]
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    wanted = f"{len(elements)} buckets of {sum(elements)} elements"
    try:
        found = offers_of_all(
            _name(group), handshake(_OP, "what they allocated", group), problem, wanted, (layout,)
        )
        differing = [rank for rank, offer in enumerate(found) if offer != found[0]]
        if differing:  # all ranks see the same answers
            raise CannotTakePart(
                f"{_name(group)}: buckets of rank {differing[0]} have other offsets in segments than rank 0's"
            )
    except CannotTakePart:
        flats.clear()
        plain.clear()
        give_back_unused()
        raise
    return flats, plain


def slowest(group: ProcessGroup, flats: Sequence[Tensor], collective: Collective) -> list[float]:
    """Time the collective over each tensor of zeros; return milliseconds of the slowest rank."""
    own = milliseconds(group, flats, collective)
    call = handshake(_OP, "how long it took", group)
    found = offers_of_all(_name(group), call, "", "", [repr(time) for time in own])
    return [max(map(float, times)) for times in zip(*found, strict=True)]


def _name(group: ProcessGroup) -> str:
    return f"{_OP}, process group '{group.group_name}'"


def _say(group: ProcessGroup, key: SizeClass, what: str) -> None:
    select.choices.info(
        "gradient buckets of up to %.3g MiB %s, %s, process group '%s' of %d ranks: %s",
        key.size / 2**20, str(key.dtype).removeprefix("torch."), key.collective, group.group_name,
        group.size(), what,
    )  # fmt: skip


def may_serve(device: torch.device) -> bool:
    """Whether buckets can be registered now: on CUDA, outside a graph capture; alike on all ranks."""
    return device.type == "cuda" and not is_capturing(device)


def is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def why_not(group: ProcessGroup, device: torch.device) -> str:
    """Return why this rank cannot or must not use registered memory; "" if it can."""
    if select.requested_transport == "c10d":
        return "TPKERNELS_TRANSPORT=c10d"
    if mode.segments or torch.are_deterministic_algorithms_enabled():
        return "a choice by time could change the bits of sums from run to run"
    if os.environ.get("NCCL_LOCAL_REGISTER") == "0":
        return "NCCL_LOCAL_REGISTER=0"
    backend = backend_of(group, device)
    if backend.name() != "nccl":
        return f"the backend for {device.type} is {backend.name()}"
    if missing := [call for call in CALLS if not hasattr(type(backend), call)]:
        return f"{type(backend).__name__} of torch {torch.__version__} has no {missing[0]}"
    return "" if hasattr(torch.cuda, "MemPool") else f"torch {torch.__version__} has no torch.cuda.MemPool"


def backend_of(group: ProcessGroup, device: torch.device) -> Any:
    return group._get_backend(device)


class NcclMemory:
    """A memory pool of NCCL's allocator, registered with the communicator of `group`, and its tensors.

    The group is referenced weakly: it may end before the tensors.
    """

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        """Make an empty pool. The communicator must be connected: a pool cannot be registered before."""
        self._group, self._device, self._process = ref(group), device, os.getpid()
        with torch.cuda.device(device):  # a pool belongs to the current one
            self._pool = torch.cuda.MemPool(backend_of(group, device).mem_allocator)
        self._storages: list[StorageWeakRef] = []
        self._registered = False

    def zeros(self, elements: Sequence[int], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
        """Allocate flat tensors of zeros in the pool; their order decides their offsets in its segments."""
        with torch.inference_mode(False), torch.cuda.use_mem_pool(self._pool, self._device):
            flats = [
                torch.zeros(count, dtype=dtype, device=self._device)
                for count, dtype in zip(elements, dtypes, strict=True)
            ]
        self._storages += [StorageWeakRef(flat.untyped_storage()) for flat in flats]
        return flats

    def register(self) -> None:
        """Register the pool with this rank's communicator, without communication."""
        group = self._group()
        assert group is not None, "the caller has the group"
        self._registered = True  # also after an error: some segments may be registered
        backend_of(group, self._device).register_mem_pool(self._pool)

    def layout(self, flats: Sequence[Tensor]) -> str:
        """Return a digest of the offsets of tensors in their segments, to compare over ranks.

        Offsets can differ: each rank's environment configures its allocator.
        """
        places = []
        for flat in flats:
            address = flat.data_ptr()
            places += [
                (address - start, size) for start, size in self._segments() if start <= address < start + size
            ]
        if len(places) != len(flats):
            raise RuntimeError(f"{len(flats)} buckets were allocated, but the pool has {len(places)} of them")
        return hashlib.blake2b(repr(places).encode(), digest_size=16).hexdigest()

    def in_use(self) -> bool:
        """Whether a tensor of the pool, or a view such as a gradient, still exists."""
        return not all(storage.expired() for storage in self._storages)

    def end(self) -> bool:
        """Deregister and free the unused pool; return whether that was possible now."""
        if os.getpid() != self._process:
            return False  # CUDA does not survive a fork, nor does the communicator
        if is_capturing(self._device):
            return False  # which would end the capture
        if self._registered and (group := self._group()) is not None and is_alive(group):
            try:
                torch.cuda.synchronize(self._device)  # kernels of the last collective
                backend_of(group, self._device).deregister_mem_pool(self._pool)
            except RuntimeError:  # the communicator was aborted, say
                return False  # its addresses stay taken as long as the communicator may know them
        self._registered = False
        del self._pool
        return True

    def _segments(self) -> list[tuple[int, int]]:
        return [(segment["address"], segment["total_size"]) for segment in self._pool.snapshot()]


def milliseconds(group: ProcessGroup, flats: Sequence[Tensor], collective: Collective) -> list[float]:
    """Time the collective over each tensor on this rank, interleaved; return each lower quartile.

    Called by all ranks of the group at once. flats: zeros, which stay zeros
    """
    marks: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in flats]
    with torch.no_grad(), torch.cuda.device(flats[0].device):
        for number in range(WARM_UPS + ROUNDS):
            for flat, own in zip(flats, marks, strict=True):
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                reduce(group, flat, collective)
                end.record()
                if number >= WARM_UPS:
                    own.append((begin, end))
        torch.cuda.synchronize()
    return [sorted(begin.elapsed_time(end) for begin, end in own)[ROUNDS // 4] for own in marks]


def reduce(group: ProcessGroup, flat: Tensor, collective: Collective) -> None:
    """Reduce a bucket in place, as `GradientBuckets` does; the current stream waits for it."""
    if collective == "all_reduce":
        start_all_reduce(group, flat, ReduceOp.SUM, None).wait()
    else:
        shard = flat.tensor_split(group.size())[group.rank()]
        start_reduce_scatter(group, shard, flat, ReduceOp.SUM, None).wait()
