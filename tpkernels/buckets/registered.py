"""Buckets in memory that NCCL has registered, where that is at least as fast as plain memory.

All ranks of a group choose alike: NCCL takes registered memory of all ranks, or of none. So each rank tries,
and tells the others what came of it, before a collective touches the memory. The first buckets of a size
class are then timed in both memories, and the slowest rank of each decides. The choice holds for this group
and process; one line on the logger "tpkernels.choices" tells it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from tpkernels.buckets import nccl_memory, reduction_times
from tpkernels.buckets.nccl_memory import NcclMemory
from tpkernels.buckets.reduction_times import Reduction
from tpkernels.comm.agreement import CannotTakePart, offers_of_all
from tpkernels.comm.calls import handshake
from tpkernels.comm.groups import start_all_reduce
from tpkernels.comm.transports.select import choices

_OP = "registered memory of gradient buckets"


class Key(NamedTuple):
    """What is timed once."""

    reduction: Reduction
    dtype: torch.dtype
    size: int  # bytes of the largest bucket, up to a power of two


# Whether a group can have registered memory at all, under None, and whether a key takes it.
_chosen: WeakKeyDictionary[ProcessGroup, dict[Key | None, bool]] = WeakKeyDictionary()
_held: list[NcclMemory] = []  # until nothing uses it


def registered_zeros(
    group: ProcessGroup,
    elements: Sequence[int],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    reduction: Reduction,
) -> list[Tensor] | None:
    """A flat tensor of zeros for each bucket; None, on all ranks alike, if plain memory is to be taken.

    All ranks of the group call this at once with equal arguments, and send these tensors, not copies of them.
    """
    give_back_unused()
    if not elements or group.size() == 1 or not nccl_memory.may_serve(device):
        return None
    sizes = [count * dtype.itemsize for count, dtype in zip(elements, dtypes, strict=True)]
    largest = sizes.index(max(sizes))
    key = Key(reduction, dtypes[largest], 1 << (sizes[largest] - 1).bit_length())
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
    ours, theirs = slowest(group, [flats[largest], *plain], reduction)
    known[key] = ours <= theirs
    memory = "registered" if known[key] else "plain"
    _say(group, key, f"{memory} memory (registered {ours:.3g} ms, plain {theirs:.3g} ms)")
    if known[key]:
        return flats
    flats.clear()
    give_back_unused()
    return None


def give_back_unused() -> None:
    """Memory whose tensors are gone. Not called by their end, which comes amid anything, in any thread.

    Before each step, say: work in flight holds tensors a little longer than whoever started it.
    """
    _held[:] = [memory for memory in _held if memory.in_use() or not memory.end()]


def connected_by_all(group: ProcessGroup, device: torch.device) -> None:
    """Connect the communicator if all ranks want registered memory; else CannotTakePart on all ranks."""
    try:
        problem = nccl_memory.why_not(group, device)
    except Exception as error:  # whatever it is, the others wait to be told
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
    """Registered tensors, and a plain one like that at `beside`; CannotTakePart on all ranks if one fails."""
    flats: list[Tensor] = []
    plain: list[Tensor] = []
    problem = layout = ""
    try:
        memory = NcclMemory(group, device)
        _held.append(memory)
        flats = memory.zeros(elements, dtypes)
        memory.register()
        layout = memory.layout(flats)
        if beside is not None:  # now: nobody fails between two collectives
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
                f"{_name(group)}: buckets of rank {differing[0]} lie elsewhere in segments than rank 0's"
            )
    except CannotTakePart:
        flats.clear()
        plain.clear()
        give_back_unused()
        raise
    return flats, plain


def slowest(group: ProcessGroup, flats: Sequence[Tensor], reduction: Reduction) -> list[float]:
    """Milliseconds of the reduction of each tensor of zeros, on the rank where it takes longest."""
    own = reduction_times.milliseconds(group, flats, reduction)
    call = handshake(_OP, "how long it took", group)
    found = offers_of_all(_name(group), call, "", "", [repr(time) for time in own])
    return [max(map(float, times)) for times in zip(*found, strict=True)]


def _name(group: ProcessGroup) -> str:
    return f"{_OP}, process group '{group.group_name}'"


def _say(group: ProcessGroup, key: Key, what: str) -> None:
    choices.info(
        "gradient buckets of up to %.3g MiB %s, %s, process group '%s' of %d ranks: %s",
        key.size / 2**20, str(key.dtype).removeprefix("torch."), key.reduction, group.group_name,
        group.size(), what,
    )  # fmt: skip
