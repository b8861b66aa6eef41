"""Computes a function of full matrices, once for each matrix, from shards on all ranks of a group.

Each matrix has one owner among the R ranks of the group. In a round:

    gather     all-to-all: each rank sends to each owner its shards of the owner's matrices
    compute    each owner, on its full matrices
    scatter    all-to-all: each owner sends to each rank the shards of its results

Shards are sent in bfloat16, in one flat buffer a round and direction: two collectives for all its matrices.
The next round is gathered while this one is computed. All ranks compute replicated matrices.

With D data-parallel replicas of the group, each replica computes its own matrices only; then

    replicas   all-gather over the data-parallel ranks, which hold the same shards: of the results
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from tpkernels.checkpoints.shards import TensorShard
from tpkernels.comm.groups import failed, start_all_gather, start_all_to_all

WIRE = torch.bfloat16
MatrixFunction = Callable[[int, Tensor], Tensor]  # takes a position and its matrix, which it may overwrite
Owned = tuple[int, int]  # a matrix by its position in the caller's list, and the rank that computes it
Received = Callable[[], list[list[Tensor]]]  # waits; returns flat tensors from each rank


class FullMatrices:
    """Gathers each matrix on its owner, and scatters shards of the results back."""

    def __init__(
        self,
        shards: Sequence[TensorShard],
        costs: Sequence[int],
        group: ProcessGroup,
        replicas: ProcessGroup | None,
        round_bytes: int,
    ) -> None:
        """shards: of the same matrices on all ranks; costs: of `compute` for each matrix"""
        self.shards, self.group, self.replicas = shards, group, replicas
        self.replica_of: dict[int, int] = {}  # by position
        split = [i for i, shard in enumerate(shards) if shard.dim is not None and group.size() > 1]
        alone = [i for i in range(len(shards)) if i not in set(split)]
        self.rounds = self._dealt(split, costs, group.size(), round_bytes)
        self.computed_here = [
            i for matrices in self._dealt(alone, costs, 1, round_bytes) for i, _ in matrices
        ]

    def _dealt(
        self, positions: Sequence[int], costs: Sequence[int], ranks: int, round_bytes: int
    ) -> list[list[Owned]]:
        """Return this replica's matrices by round, with owners among its `ranks` ranks."""
        count, here = (1, 0) if self.replicas is None else (self.replicas.size(), self.replicas.rank())
        sizes = [WIRE.itemsize * self.shards[i].shape[0] * self.shards[i].shape[1] for i in positions]
        rounds = []
        for matrices in plan_rounds([costs[i] for i in positions], sizes, ranks * count, round_bytes):
            placed = [(positions[number], *divmod(owner, ranks)) for number, owner in matrices]
            self.replica_of |= {i: replica for i, replica, _ in placed}
            rounds.append([(i, owner) for i, replica, owner in placed if replica == here])
        return rounds

    @torch.no_grad()
    def apply(self, compute: MatrixFunction, held: Mapping[int, Tensor]) -> Iterator[tuple[int, Tensor]]:
        """Yield this rank's shard of each result, with its position.

        held: this rank's shards without padding, by position; the same positions on all ranks
        """
        own = self._of_this_replica(compute, held)
        yield from own if self.replicas is None else self._of_all(dict(own), held, self.replicas)

    def _of_all(
        self, own: Mapping[int, Tensor], held: Mapping[int, Tensor], replicas: ProcessGroup
    ) -> Iterator[tuple[int, Tensor]]:
        """All-gather the results over `replicas`, and yield them."""
        positions = [[i for i in held if self.replica_of[i] == replica] for replica in range(replicas.size())]
        longest = max(sum(held[i].numel() for i in some) for some in positions)
        if not longest:
            return
        sent = torch.zeros(longest, dtype=WIRE, device=next(iter(held.values())).device)
        mine = [own[i].reshape(-1).to(WIRE) for i in positions[replicas.rank()]]
        if mine:
            torch.cat(mine, out=sent[: sum(map(len, mine))])
        gathered = sent.new_empty(replicas.size(), longest)
        work = start_all_gather(replicas, gathered.view(-1).view(torch.uint8), sent.view(torch.uint8))
        _wait(work, "all-gather of results", replicas)
        for some, flat in zip(positions, gathered, strict=True):
            sizes = [held[i].numel() for i in some]
            for i, result in zip(some, flat[: sum(sizes)].split(sizes), strict=True):
                yield i, result.view(held[i].shape)

    def _of_this_replica(
        self, compute: MatrixFunction, held: Mapping[int, Tensor]
    ) -> Iterator[tuple[int, Tensor]]:
        for i in self.computed_here:
            if i in held:
                yield i, compute(i, held[i])
        rounds = [[(i, owner) for i, owner in matrices if i in held] for matrices in self.rounds]
        rounds = [matrices for matrices in rounds if matrices]
        gathering = self._gather(rounds[0], held) if rounds else None
        scattering: Received | None = None
        for number, matrices in enumerate(rounds):
            assert gathering is not None
            received = gathering()
            if number + 1 < len(rounds):
                gathering = self._gather(rounds[number + 1], held)
            begun = self._compute(compute, matrices, received)
            if scattering is not None:
                yield from self._taken(rounds[number - 1], scattering())
            scattering = begun
        if scattering is not None:
            yield from self._taken(rounds[-1], scattering())

    def _gather(self, matrices: Sequence[Owned], held: Mapping[int, Tensor]) -> Received:
        me, ranks = self.group.rank(), range(self.group.size())
        sent = [[held[i] for i, owner in matrices if owner == rank] for rank in ranks]
        shapes = [[self._shape(i, rank) for i, owner in matrices if owner == me] for rank in ranks]
        return self._exchange(sent, shapes)

    def _compute(
        self, compute: MatrixFunction, matrices: Sequence[Owned], received: Sequence[Sequence[Tensor]]
    ) -> Received:
        """Compute this rank's matrices from the received shards, and start to send shards of the results."""
        me, ranks = self.group.rank(), range(self.group.size())
        results: list[list[Tensor]] = [[] for _ in ranks]
        for number, i in enumerate(i for i, owner in matrices if owner == me):
            shard = self.shards[i]
            full = received[0][0].new_empty(shard.shape)
            for rank in ranks:
                for chunk in shard.chunks(received[rank][number], rank):
                    full[chunk.where] = chunk.view
            result = compute(i, full)
            for rank, own in enumerate(results):
                assert shard.dim is not None
                ranges = [result.narrow(shard.dim, each.start, len(each)) for each in shard.ranges[rank]]
                own.append(torch.cat(ranges, shard.dim).to(WIRE))
        shapes = [[self._shape(i, me) for i, owner in matrices if owner == rank] for rank in ranks]
        return self._exchange(results, shapes)

    def _taken(
        self, matrices: Sequence[Owned], received: Sequence[Sequence[Tensor]]
    ) -> Iterator[tuple[int, Tensor]]:
        arrived = [iter(shards) for shards in received]
        for i, owner in matrices:
            yield i, next(arrived[owner])

    def _exchange(self, sent: Sequence[Sequence[Tensor]], shapes: list[list[tuple[int, int]]]) -> Received:
        """Start an all-to-all. sent: tensors for each rank; shapes: of those from each rank"""
        flat = [tensor.reshape(-1).to(WIRE) for tensors in sent for tensor in tensors]
        data = torch.cat(flat) if flat else self.shards[0].tensor.new_empty(0, dtype=WIRE)
        sizes = [[rows * columns for rows, columns in some] for some in shapes]
        received = data.new_empty(sum(map(sum, sizes)))
        counts = [sum(tensor.numel() for tensor in tensors) for tensors in sent]
        into, out = (flat.view(torch.uint8).view(-1, WIRE.itemsize) for flat in (received, data))  # for gloo
        work = start_all_to_all(self.group, into, out, list(map(sum, sizes)), counts)

        def wait(_sent: Tensor = data) -> list[list[Tensor]]:  # kept until it has arrived
            _wait(work, "all-to-all of matrices", self.group)
            by_rank = received.split(list(map(sum, sizes)))
            return [
                [own.view(shape) for own, shape in zip(flat.split(some), shaped, strict=True)]
                for flat, some, shaped in zip(by_rank, sizes, shapes, strict=True)
            ]

        return wait

    def _shape(self, position: int, rank: int) -> tuple[int, int]:
        """Return the shape of a rank's shard without padding."""
        shard = self.shards[position]
        assert shard.dim is not None
        shape = [*shard.shape]
        shape[shard.dim] = sum(map(len, shard.ranges[rank]))
        return shape[0], shape[1]


def _wait(work: Work, what: str, group: ProcessGroup) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise failed(f"optim: an {what}", group.group_name, group.size(), error) from error


def plan_rounds(
    costs: Sequence[int], sizes: Sequence[int], ranks: int, round_bytes: int
) -> list[list[Owned]]:
    """Assign each matrix to the rank with the least work in its round, expensive matrices first.

    costs: of orthogonalizing each matrix
    sizes: of each full matrix, in bytes; a round has at least ranks x round_bytes, and a multiple of `ranks`
        matrices
    """
    expensive_first = sorted(range(len(costs)), key=lambda position: (-costs[position], position))
    rounds: list[list[Owned]] = []
    work = [0] * ranks  # of all rounds: decides between ranks that are equally busy in this one
    waiting: list[int] = []
    for number, position in enumerate(expensive_first, 1):
        waiting.append(position)
        is_full = sum(sizes[each] for each in waiting) >= ranks * round_bytes and not len(waiting) % ranks
        if not is_full and number < len(costs):
            continue
        here = [0] * ranks
        rounds.append([])
        for each in waiting:
            owner = min(range(ranks), key=lambda rank: (here[rank], work[rank], rank))
            here[owner] += costs[each]
            work[owner] += costs[each]
            rounds[-1].append((each, owner))
        waiting = []
    return rounds
