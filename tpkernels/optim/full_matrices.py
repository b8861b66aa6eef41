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

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from tpkernels.checkpoints.shards import TensorShard
from tpkernels.comm.groups import failed, start_all_gather, start_all_to_all

WIRE = torch.bfloat16
MatrixFunction = Callable[[int, Tensor], Tensor]  # takes a position and its matrix, which it may overwrite


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
        self.shards = shards
        self.group = group
        self.replicas = replicas
        self.replica_of: dict[int, int] = {}  # by position
        split = [i for i, shard in enumerate(shards) if shard.dim is not None and group.size() > 1]
        alone = [i for i in range(len(shards)) if i not in set(split)]
        self.rounds = self._dealt(split, costs, group.size(), round_bytes)
        self.computed_here = [
            matrix.position for matrices in self._dealt(alone, costs, 1, round_bytes) for matrix in matrices
        ]

    def _dealt(
        self, positions: Sequence[int], costs: Sequence[int], ranks: int, round_bytes: int
    ) -> list[list[OwnedMatrix]]:
        """Return this replica's matrices by round, with owners among its `ranks` ranks."""
        count, here = (1, 0) if self.replicas is None else (self.replicas.size(), self.replicas.rank())
        sizes = [WIRE.itemsize * self.shards[i].shape[0] * self.shards[i].shape[1] for i in positions]
        rounds = []
        for matrices in plan_rounds([costs[i] for i in positions], sizes, ranks * count, round_bytes):
            mine = []
            for matrix in matrices:
                position, (replica, owner) = positions[matrix.position], divmod(matrix.owner, ranks)
                self.replica_of[position] = replica
                if replica == here:
                    mine.append(OwnedMatrix(position, owner))
            rounds.append(mine)
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
        rounds = [tuple(matrix for matrix in matrices if matrix.position in held) for matrices in self.rounds]
        rounds = [matrices for matrices in rounds if matrices]
        gathering = self._gather(rounds[0], held) if rounds else None
        scattering: _TransferUnderWay | None = None
        for number, matrices in enumerate(rounds):
            assert gathering is not None
            received = gathering.wait()
            if number + 1 < len(rounds):
                gathering = self._gather(rounds[number + 1], held)
            begun = self._compute(compute, matrices, received)
            if scattering is not None:
                yield from self._taken(rounds[number - 1], scattering.wait())
            scattering = begun
        if scattering is not None:
            yield from self._taken(rounds[-1], scattering.wait())

    def _gather(self, matrices: Sequence[OwnedMatrix], held: Mapping[int, Tensor]) -> _TransferUnderWay:
        me = self.group.rank()
        return self._exchange(
            [
                [held[matrix.position] for matrix in matrices if matrix.owner == owner]
                for owner in self._ranks()
            ],
            [
                [self._elements(matrix, rank) for matrix in matrices if matrix.owner == me]
                for rank in self._ranks()
            ],
        )

    def _compute(
        self, compute: MatrixFunction, matrices: Sequence[OwnedMatrix], received: Sequence[Sequence[Tensor]]
    ) -> _TransferUnderWay:
        """Compute this rank's matrices from the received shards, and start to send shards of the results."""
        me = self.group.rank()
        results: list[list[Tensor]] = [[] for _ in self._ranks()]
        for number, matrix in enumerate(matrix for matrix in matrices if matrix.owner == me):
            shard = self.shards[matrix.position]
            full = received[0][0].new_empty(shard.shape)
            for rank, flat in enumerate(shards[number] for shards in received):
                for chunk in shard.chunks(flat.view(self._shape(matrix, rank)), rank):
                    full[chunk.where] = chunk.view
            result = compute(matrix.position, full)
            for rank, own in enumerate(results):
                assert shard.dim is not None
                ranges = [result.narrow(shard.dim, each.start, len(each)) for each in shard.ranges[rank]]
                own.append(torch.cat(ranges, shard.dim).to(WIRE))
        sizes = [
            [self._elements(matrix, me) for matrix in matrices if matrix.owner == owner]
            for owner in self._ranks()
        ]
        return self._exchange(results, sizes)

    def _taken(
        self, matrices: Sequence[OwnedMatrix], received: Sequence[Sequence[Tensor]]
    ) -> Iterator[tuple[int, Tensor]]:
        arrived = [iter(shards) for shards in received]
        for matrix in matrices:
            yield matrix.position, next(arrived[matrix.owner]).view(self._shape(matrix, self.group.rank()))

    def _exchange(
        self, sent: Sequence[Sequence[Tensor]], sizes: Sequence[Sequence[int]]
    ) -> _TransferUnderWay:
        """Start an all-to-all. sent: tensors for each rank; sizes: numbers of elements from each rank"""
        flat = [tensor.reshape(-1).to(WIRE) for tensors in sent for tensor in tensors]
        device = self.shards[0].tensor.device
        data = torch.cat(flat) if flat else torch.empty(0, dtype=WIRE, device=device)
        received = data.new_empty(sum(map(sum, sizes)))
        counts = [sum(tensor.numel() for tensor in tensors) for tensors in sent]
        into, out = (flat.view(torch.uint8).view(-1, WIRE.itemsize) for flat in (received, data))  # for gloo
        work = start_all_to_all(self.group, into, out, list(map(sum, sizes)), counts)
        return _TransferUnderWay(work, data, received, sizes, self.group)

    def _ranks(self) -> Iterable[int]:
        return range(self.group.size())

    def _shape(self, matrix: OwnedMatrix, rank: int) -> tuple[int, ...]:
        shard = self.shards[matrix.position]
        assert shard.dim is not None
        length = sum(map(len, shard.ranges[rank]))
        return (*shard.shape[: shard.dim], length, *shard.shape[shard.dim + 1 :])

    def _elements(self, matrix: OwnedMatrix, rank: int) -> int:
        rows, columns = self._shape(matrix, rank)
        return rows * columns


@dataclass(frozen=True)
class _TransferUnderWay:
    """An all-to-all in flight; `sent` is kept until it has ended."""

    work: Work
    sent: Tensor
    received: Tensor
    sizes: Sequence[Sequence[int]]
    group: ProcessGroup

    def wait(self) -> list[list[Tensor]]:
        """Wait; return the tensors from each rank."""
        _wait(self.work, "all-to-all of matrices", self.group)
        by_rank = self.received.split(list(map(sum, self.sizes)))
        return [list(own.split(list(sizes))) for own, sizes in zip(by_rank, self.sizes, strict=True)]


def _wait(work: Work, what: str, group: ProcessGroup) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise failed(f"optim: an {what}", group.group_name, group.size(), error) from error


# The plan: the rank that orthogonalizes each matrix, and its round.


@dataclass(frozen=True)
class OwnedMatrix:
    """A matrix, by its position in the caller's list, and the rank of the group that owns it."""

    position: int
    owner: int


def plan_rounds(
    costs: Sequence[int], sizes: Sequence[int], ranks: int, round_bytes: int
) -> list[tuple[OwnedMatrix, ...]]:
    """Assign each matrix to the rank with the least work in its round, expensive matrices first.

    costs: of orthogonalizing each matrix
    sizes: of each full matrix, in bytes; a round has at least ranks x round_bytes, and a multiple of `ranks`
        matrices
    """
    expensive_first = sorted(range(len(costs)), key=lambda position: (-costs[position], position))
    rounds: list[tuple[OwnedMatrix, ...]] = []
    work = [0] * ranks  # of all rounds
    waiting: list[int] = []
    for number, position in enumerate(expensive_first, 1):
        waiting.append(position)
        is_full = sum(sizes[each] for each in waiting) >= ranks * round_bytes and not len(waiting) % ranks
        if is_full or number == len(costs):
            rounds.append(_shared_out(waiting, costs, work))
            waiting = []
    return rounds


def _shared_out(positions: Sequence[int], costs: Sequence[int], work: list[int]) -> tuple[OwnedMatrix, ...]:
    """Assign matrices of a round to ranks, and add to `work`, which decides between equally busy ranks."""
    here = [0] * len(work)
    matrices = []
    for position in positions:
        owner = min(range(len(work)), key=lambda rank: (here[rank], work[rank], rank))
        here[owner] += costs[position]
        work[owner] += costs[position]
        matrices.append(OwnedMatrix(position, owner))
    return tuple(matrices)
