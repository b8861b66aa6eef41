"""Moves blocks between the tensors of ranks: copies those that a rank holds itself, and sends the others.

Blocks travel in messages of at most `bucket_bytes`; a rank has at most `buckets` messages in flight. Next to
its tensors a rank uses the memory of these messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tpkernels.checkpoints.moves import Block, BlockMessage, BlockMove
from tpkernels.checkpoints.shards import Chunk
from tpkernels.comm.calls import Call, begin, calls_of
from tpkernels.comm.groups import exchange_device
from tpkernels.comm.transports.c10d import Launches

Chunks = Mapping[str, Sequence[Chunk]]  # by the tensor's name


def view_of(chunks: Sequence[Chunk], block: Block) -> Tensor:
    """Return the view of a block that lies in one of the chunks."""
    for view, outer in chunks:
        ends = zip(outer, block, strict=True)
        if all(low <= begin and end <= high for (low, high), (begin, end) in ends):
            for dim, ((low, _), (begin, end)) in enumerate(zip(outer, block, strict=True)):
                if end - begin != view.shape[dim]:
                    view = view.narrow(dim, begin - low, end - begin)
            return view
    raise AssertionError(f"no chunk has {block}")


@torch.no_grad()
def copy_own(moves: Sequence[BlockMove], sources: Chunks, targets: Chunks) -> None:
    """Copy the blocks that this rank holds itself."""
    for move in moves:
        source = view_of(sources[move.name], move.block)
        target = view_of(targets[move.name], move.block)
        if source.data_ptr() != target.data_ptr():
            target.copy_(source)


@torch.no_grad()
def exchange(
    messages: Sequence[BlockMessage],
    buckets: int,
    group: ProcessGroup,
    sources: Chunks,
    targets: Chunks,
    dtypes: Mapping[str, torch.dtype],
) -> None:
    """Send and receive messages, `buckets` at a time. Called by all ranks of the group.

    messages: this rank's, from `moves`
    dtypes: of the sources
    """
    with calls_of(group):
        call = begin("reshard", "messages", group)
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
            slot.copy_(view_of(sources[move.name], move.block))
    launches = Launches(call, device)
    wait = launches.exchange(
        [(message.receiver, packed) for message, packed in zip(outgoing, sent, strict=True)],
        [(message.sender, packed) for message, packed in zip(incoming, received, strict=True)],
    )
    wait()
    for message, packed in zip(incoming, received, strict=True):
        for move, slot in _slots(message, packed, dtypes):
            view_of(targets[move.name], move.block).copy_(slot)
    launches.end()


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
