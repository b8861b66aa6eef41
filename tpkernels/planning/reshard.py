"""Bytes that move a GPT's weights from one layout of ranks to another."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import prod

from tpkernels.checkpoints.moves import Block, Blocks, Placement, moves_of
from tpkernels.groups.sizes import ranges_of, split_vocabulary
from tpkernels.models.config import GPTConfig
from tpkernels.planning.job import Job, RankLayout
from tpkernels.planning.memory import Weight, weights_of

ITEM_BYTES = 2  # of a weight in bfloat16


@dataclass(frozen=True, slots=True)
class Holders:
    """Ranks that hold a model: neighbours are tensor-parallel, and each such group holds a full model.

    ranks: of the world, or some of them
    """

    tensor: int
    ranks: range

    def __post_init__(self) -> None:
        if self.tensor < 1 or not self.ranks or len(self.ranks) % self.tensor:
            raise ValueError(f"tp: expected a divisor of {len(self.ranks)} ranks, got {self.tensor}")

    @property
    def copies(self) -> int:
        return len(self.ranks) // self.tensor

    def __str__(self) -> str:
        return f"tp={self.tensor} on ranks {self.ranks[0]} to {self.ranks[-1]}, {self.copies} times"


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes to move a model, over all ranks."""

    held: int  # of the model
    sent: int
    between_nodes: int  # of those that are sent
    most_sent: int  # by one rank
    most_received: int


def traffic(
    model: GPTConfig, world: int, source: Holders, target: Holders, *, gpus_per_node: int = 8
) -> Traffic:
    """Return the traffic to move a model from `source` to `target`; one layer is planned for all."""
    job = Job(model=model, tokens=1, batch=1, sequence_parallel=False)
    for holders in (source, target):
        if not (holders.ranks[0] >= 0 and holders.ranks[-1] < world):
            raise ValueError(f"ranks: expected some of 0 to {world - 1}, got {holders}")
        job.require_split(RankLayout(holders.tensor, 1, 1))
    nodes = [rank // gpus_per_node for rank in range(world)]
    weights = {weight.name: weight for weight in weights_of(model)}
    placements = [
        Placement(name, ITEM_BYTES, *(blocks_of(weight, holders, world) for holders in (source, target)))
        for name, weight in weights.items()
    ]
    sent, received = Counter[int](), Counter[int]()
    between = 0
    for name, sender, receiver, _, size in moves_of(placements, nodes):
        if sender != receiver:
            moved = size * weights[name].count
            sent[sender] += moved
            received[receiver] += moved
            between += moved if nodes[sender] != nodes[receiver] else 0
    return Traffic(
        ITEM_BYTES * sum(prod(weight.shape) * weight.count for weight in weights.values()),
        sent.total(),
        between,
        max(sent.values(), default=0),
        max(received.values(), default=0),
    )


def blocks_of(weight: Weight, holders: Holders, world: int) -> list[Blocks]:
    """Return the blocks of a weight that each rank of the world holds."""
    own: list[Blocks] = [(_shard(weight, holders.tensor, rank),) for rank in range(holders.tensor)]
    found: list[Blocks] = [()] * world
    for place, rank in enumerate(holders.ranks):
        found[rank] = own[place % holders.tensor]
    return found


def _shard(weight: Weight, ranks: int, rank: int) -> Block:
    block = [(0, size) for size in weight.shape]
    if weight.split:
        dim = int(weight.split == "columns")
        size = weight.shape[dim]
        if weight.split == "vocabulary":
            held = split_vocabulary(size, ranks=ranks).ids_of(rank)
        else:
            (held,) = ranges_of(rank, size=size, ranks=ranks)
        block[dim] = held.start, held.stop
    return tuple(block)
