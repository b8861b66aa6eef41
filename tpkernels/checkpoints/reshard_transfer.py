"""Moves blocks between the tensors of ranks.

    between                              a block
    a rank and itself                    is copied
    processes of one machine, on CPUs    is read by the receiver out of the sender's memory: one copy
    any others                           travels in a message of at most `bucket_bytes`, packed with others

Beyond its tensors a rank takes at most `buckets` x `bucket_bytes` of memory: for messages, for
addresses, and for blocks that are read into a buffer first, to be cast or transposed.

Frees the memory of tensors while a model moves: they keep their shape, and every element is NaN.

A freed tensor is the same object as before, so optimizers and tied layers still hold it. All of its elements
are one NaN in memory, which all freed tensors of a dtype and device share: computing with it gives NaN, and
torch refuses most writes. An optimizer step on it is refused, because fused optimizers ignore strides.
`give_memory` makes it a tensor like any other again, with arbitrary numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tpkernels.checkpoints.moves import Block, BlockMessage, BlockMove, parts_of
from tpkernels.checkpoints.peer_memory import Located, read
from tpkernels.checkpoints.shards import Chunk
from tpkernels.comm.calls import Call, all_or_fail, begin
from tpkernels.comm.groups import exchange_device
from tpkernels.comm.transports.c10d import Transfers

_numbers: dict[tuple[torch.dtype, torch.device], Tensor] = {}  # the NaN of all freed tensors


def is_freed(tensor: Tensor) -> bool:
    """Whether a plain tensor, or its base, was freed."""
    number = _numbers.get((tensor.dtype, tensor.device))
    return number is not None and tensor.untyped_storage().data_ptr() == number.data_ptr()


def freed_like(
    tensor: Tensor, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> Tensor:
    """Return a freed tensor of this shape, or zeros if its dtype has no NaN."""
    dtype, device = dtype or tensor.dtype, device or tensor.device
    if not dtype.is_floating_point:
        return torch.zeros(tensor.shape, dtype=dtype, device=device)
    number = _numbers.get((dtype, device))
    if number is None:
        _stop_optimizers()
        number = _numbers[dtype, device] = torch.full((), torch.nan, dtype=dtype, device=device)
    return number.expand(tensor.shape)


@torch.no_grad()
def free(tensor: Tensor) -> None:
    """Free the memory of a plain floating-point tensor and of its gradient."""
    if tensor.is_floating_point() and tensor.numel() > 1:
        torch.autograd.graph.increment_version(tensor)  # graphs that have saved it raise
        tensor.data = freed_like(tensor)
        tensor.grad = None  # so optimizers skip it


@cache
def _stop_optimizers() -> None:
    """Refuse steps of any optimizer on freed tensors; called when the first tensor is freed."""
    register_optimizer_step_pre_hook(_refuse_step)


def _refuse_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            held = [parameter, *optimizer.state.get(parameter, {}).values()]
            # subclasses may have no memory of their own to ask for, and are never freed
            if any(type(each) in (Tensor, nn.Parameter) and is_freed(each) for each in held):
                raise RuntimeError(
                    f"{type(optimizer).__name__}.step: a parameter of shape {tuple(parameter.shape)}, or its "
                    "state, was freed by reshard(free_source=True); move the model and its optimizer's state "
                    "back before"
                )


@torch.no_grad()
def give_memory(tensor: Tensor) -> None:
    """Give a freed tensor memory again, with arbitrary numbers."""
    tensor.data = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def leave_meta_device(model: nn.Module, device: torch.device) -> None:
    """As `model.to_empty(device=device)`, but parameters become freed tensors and stay the same objects.

    So an optimizer built over them stays valid.
    """
    for name, parameter in model.named_parameters():
        if _is_plain_meta(parameter):
            _leave_meta(name, parameter, device)
    for owner in model.modules():
        if any(map(_is_plain_meta, owner._buffers.values())):  # others may have DTensors, which it replaces
            owner._apply(partial(_with_memory, owner, device), recurse=False)


def _leave_meta(name: str, parameter: nn.Parameter, device: torch.device) -> None:
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        raise ValueError(
            f"'{name}' is on the meta device and has hooks, which it would lose; register them "
            "once the model is filled"
        )
    kind, attributes = type(parameter), vars(parameter)
    freed = nn.Parameter(freed_like(parameter, device=device), parameter.requires_grad)
    try:
        torch.utils.swap_tensors(parameter, freed)
    except RuntimeError as error:
        raise ValueError(f"'{name}' is on the meta device, and something else holds it: {error}") from error
    parameter.__class__, parameter.__dict__ = kind, attributes


def _with_memory(owner: nn.Module, device: torch.device, tensor: Tensor) -> Tensor:
    """Return a buffer with memory for one on the meta device; a buffer that does not move becomes NaN."""
    if not _is_plain_meta(tensor):
        return tensor
    if not any(owner._buffers.get(name) is tensor for name in owner._non_persistent_buffers_set):
        return torch.empty_like(tensor, device=device)
    if tensor.is_floating_point():
        return torch.full_like(tensor, torch.nan, device=device)
    return tensor  # torch refuses to compute with it


def _is_plain_meta(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.is_meta and not isinstance(tensor, DTensor)


def refuse_shared(named: Sequence[tuple[str, Tensor]]) -> None:
    """Raise for tensors that share memory with other tensors, and so cannot be freed."""
    owners: dict[int, str] = {}
    for name, tensor in named:
        if isinstance(tensor, DTensor):
            raise ValueError(
                f"free_source: '{name}' is a DTensor, and fully_shard keeps a view of its memory; "
                "move without free_source"
            )
        storage = tensor.untyped_storage()
        first = owners.setdefault(storage.data_ptr(), name) if tensor.numel() else name
        if first != name or storage.nbytes() != tensor.numel() * tensor.element_size():
            other = f"'{first}'" if first != name else "the rest of its buffer"
            raise ValueError(
                f"free_source: '{name}' shares memory with {other}, which may be used later; "
                "move without free_source"
            )


Chunks = Mapping[str, Sequence[Chunk]]  # by the tensor's name
_WORTH_READING = 256  # contiguous bytes of the receiver's memory; shorter runs are read into a buffer
_BYTES_OF_A_RUN = 80  # for addresses on one side, and for computing them


@dataclass(frozen=True)
class Peer:
    """A rank of this machine whose tensors this rank can read."""

    process: int
    tensors: Mapping[str, Sequence[tuple[Block, Located]]]


def block_of(chunk: Chunk) -> Block:
    return tuple((index.start, index.stop) for index in chunk.where)


def part_of(chunks: Sequence[Chunk], block: Block) -> Tensor:
    """Return the view of a block that lies in one of the chunks."""
    for chunk in chunks:
        if (begins := _begins_in(block_of(chunk), block)) is not None:
            view = chunk.view
            for dim, (first, (begin, end)) in enumerate(zip(begins, block, strict=True)):
                if end - begin != view.shape[dim]:
                    view = view.narrow(dim, first, end - begin)
            return view
    raise AssertionError(f"no chunk has {block}")


def _begins_in(outer: Block, block: Block) -> list[int] | None:
    if all(low <= begin and end <= high for (low, high), (begin, end) in zip(outer, block, strict=True)):
        return [begin - low for (low, _), (begin, _) in zip(outer, block, strict=True)]
    return None


@torch.no_grad()
def copy_own(moves: Sequence[BlockMove], sources: Chunks, targets: Chunks) -> None:
    """Copy the blocks that this rank holds itself."""
    for move in moves:
        source = part_of(sources[move.name], move.block)
        target = part_of(targets[move.name], move.block)
        if source.data_ptr() != target.data_ptr():
            target.copy_(source)


class Reads(NamedTuple):
    """Blocks that one rank reads out of the memory of its peers, whose tensors have not moved."""

    moves: Sequence[BlockMove]
    peers: Mapping[int, Peer]
    dtypes: Mapping[str, torch.dtype]  # of the sources


@torch.no_grad()
def read_from_peers(reads: Reads, targets: Chunks, most_bytes: int) -> None:
    """Read this rank's blocks out of the memory of its peers, by few system calls."""
    straight: list[tuple[int, Located, Located]] = []  # (process, there, here), found anew: targets may move
    for move in sorted(reads.moves, key=lambda move: move.sender):
        peer, dtype = reads.peers[move.sender], reads.dtypes[move.name]
        target = part_of(targets[move.name], move.block)
        there, here = _located(peer.tensors[move.name], move.block), Located.of(target)
        if target.dtype == dtype and here.run_bytes >= min(_WORTH_READING, move.size):
            straight.append((peer.process, there, here))
            continue
        # bytes an element: its share of the addresses of a run, and its place in a buffer
        of_item = 2 * _BYTES_OF_A_RUN * dtype.itemsize / min(there.run_bytes, move.size) + dtype.itemsize
        for block in parts_of(move.block, max(1, int(most_bytes / of_item))):
            into, source = part_of(targets[move.name], block), _located(peer.tensors[move.name], block)
            into.copy_(_as_read(peer.process, source, dtype, most_bytes))
    _read_pairs(straight, most_bytes)


def _read_pairs(pairs: Sequence[tuple[int, Located, Located]], most_bytes: int) -> None:
    """Read tensors of other processes, by few system calls. pairs: (process, there, here), by process"""
    for process, some in groupby(pairs, lambda pair: pair[0]):
        batch, taken = list[tuple[Tensor, Tensor]](), 0
        for _, there, here in some:
            for runs in _runs_of(there, here, most_bytes):
                size = sum(map(len, runs)) * _BYTES_OF_A_RUN
                if batch and taken + size > most_bytes:
                    read(process, *map(torch.cat, zip(*batch, strict=True)))
                    batch, taken = [], 0
                batch.append(runs)
                taken += size
        read(process, *map(torch.cat, zip(*batch, strict=True)))


def _as_read(process: int, source: Located, dtype: torch.dtype, most_bytes: int) -> Tensor:
    buffer = torch.empty(source.shape, dtype=dtype, device="cpu")
    _read_pairs([(process, source, Located.of(buffer))], most_bytes)
    return buffer


def _runs_of(there: Located, here: Located, most_bytes: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield runs of two tensors of one shape, at most as many at once as their addresses may take."""
    run = min(there.run_bytes, here.run_bytes)
    most = most_bytes * run // (2 * _BYTES_OF_A_RUN) // here.item_bytes
    for block in parts_of(tuple((0, size) for size in here.shape), max(1, most)):
        begins, shape = [begin for begin, _ in block], [end - begin for begin, end in block]
        yield there.part(begins, shape).runs(), here.part(begins, shape).runs()


def _located(tensors: Sequence[tuple[Block, Located]], block: Block) -> Located:
    for outer, located in tensors:
        if (begins := _begins_in(outer, block)) is not None:
            return located.part(begins, [end - begin for begin, end in block])
    raise AssertionError(f"the peer has no {block}")


@all_or_fail
@torch.no_grad()
def exchange(
    what: str,
    messages: Sequence[BlockMessage],
    buckets: int,
    group: ProcessGroup,
    sources: Chunks,
    targets: Chunks,
    dtypes: Mapping[str, torch.dtype],
) -> None:
    """Send and receive messages, `buckets` at a time. Called by all ranks of the group.

    what: a description of the call, the same on all ranks
    messages: this rank's, from `topology.moves`
    dtypes: of the sources
    """
    call = begin("reshard", what, group)
    for first in range(0, len(messages), buckets):
        _exchange_some(call, messages[first : first + buckets], sources, targets, dtypes)


def _exchange_some(
    call: Call,
    messages: Sequence[BlockMessage],
    sources: Chunks,
    targets: Chunks,
    dtypes: Mapping[str, torch.dtype],
) -> None:
    rank, device = call.group.rank(), exchange_device(call.group)
    outgoing = [message for message in messages if message.sender == rank]
    incoming = [message for message in messages if message.receiver == rank]
    sent, received = (
        [torch.empty(message.size, dtype=torch.uint8, device=device) for message in some]
        for some in (outgoing, incoming)
    )
    for message, packed in zip(outgoing, sent, strict=True):
        for move, slot in _slots(message, packed, dtypes):
            slot.copy_(part_of(sources[move.name], move.block))
    transfers = Transfers(call)
    works = transfers.exchange_all(
        [(message.receiver, packed) for message, packed in zip(outgoing, sent, strict=True)],
        [(message.sender, packed) for message, packed in zip(incoming, received, strict=True)],
    )
    for work, message, packed in zip(works, incoming, received, strict=True):
        transfers.await_rows(work, [message.sender])
        for move, slot in _slots(message, packed, dtypes):
            part_of(targets[move.name], move.block).copy_(slot)
    transfers.await_sends()


def _slots(
    message: BlockMessage, packed: Tensor, dtypes: Mapping[str, torch.dtype]
) -> list[tuple[BlockMove, Tensor]]:
    """Return the slot of each block in a message. Large items come first, so that each is aligned."""
    slots, offset = [], 0
    for move in sorted(message.moves, key=lambda move: -dtypes[move.name].itemsize):
        memory = packed[offset : offset + move.size].view(dtypes[move.name])
        slots.append((move, memory.view([end - begin for begin, end in move.block])))
        offset += move.size
    return slots
