"""A function of full matrices, computed once each, of which every rank of a group holds shards.

R ranks. In a round each matrix has one owner:

    gather     all-to-all: each rank sends to each owner its shards of the owner's matrices
    compute    each owner, on its full matrices
    scatter    all-to-all: each owner sends to each rank the shards of its results

Shards travel in bfloat16, in one flat buffer a round and direction: two collectives, however many matrices.
The next round is gathered while this one is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from tpkernels.comm.groups import start_all_to_all
from tpkernels.interop.shards import TensorShard
from tpkernels.optim.rounds import Job, plan_rounds

WIRE = torch.bfloat16
Compute = Callable[[int, Tensor], Tensor]  # of the matrix at a position; may overwrite it


class FullMatrices:
    """Where shards of `shards` go, and come back from."""

    def __init__(
        self, shards: Sequence[TensorShard], costs: Sequence[int], group: ProcessGroup, round_bytes: int
    ) -> None:
        """shards: the same matrices on all ranks, none of them replicated; costs: of `compute`, of each"""
        self.shards = shards
        self.group = group
        sizes = [WIRE.itemsize * shard.shape[0] * shard.shape[1] for shard in shards]
        self.rounds = plan_rounds(costs, sizes, group.size(), round_bytes)

    @torch.no_grad()
    def apply(self, compute: Compute, held: Mapping[int, Tensor]) -> Iterator[tuple[int, Tensor]]:
        """This rank's shard of each result, with its position.

        held: this rank's shards without padding, by position; the same positions on all ranks
        """
        rounds = [tuple(job for job in jobs if job.position in held) for jobs in self.rounds]
        rounds = [jobs for jobs in rounds if jobs]
        gathering = self._gather(rounds[0], held) if rounds else None
        scattering: _Moving | None = None
        for number, jobs in enumerate(rounds):
            assert gathering is not None
            received = gathering.wait()
            if number + 1 < len(rounds):
                gathering = self._gather(rounds[number + 1], held)
            begun = self._compute(compute, jobs, received)
            if scattering is not None:
                yield from self._taken(rounds[number - 1], scattering.wait())
            scattering = begun
        if scattering is not None:
            yield from self._taken(rounds[-1], scattering.wait())

    def _gather(self, jobs: Sequence[Job], held: Mapping[int, Tensor]) -> _Moving:
        me = self.group.rank()
        return self._exchange(
            [[held[job.position] for job in jobs if job.owner == owner] for owner in self._ranks()],
            [[self._elements(job, rank) for job in jobs if job.owner == me] for rank in self._ranks()],
        )

    def _compute(
        self, compute: Compute, jobs: Sequence[Job], received: Sequence[Sequence[Tensor]]
    ) -> _Moving:
        """Compute what this rank owns, from what each rank has sent, and send shards of it."""
        me = self.group.rank()
        results: list[list[Tensor]] = [[] for _ in self._ranks()]
        for number, job in enumerate(job for job in jobs if job.owner == me):
            shard = self.shards[job.position]
            full = received[0][0].new_empty(shard.shape)
            for rank, flat in enumerate(shards[number] for shards in received):
                for chunk in shard.chunks(flat.view(self._shape(job, rank)), rank):
                    full[chunk.where] = chunk.view
            result = compute(job.position, full)
            for rank, own in enumerate(results):
                assert shard.dim is not None
                ranges = [result.narrow(shard.dim, each.start, len(each)) for each in shard.ranges[rank]]
                own.append(torch.cat(ranges, shard.dim).to(WIRE))
        sizes = [[self._elements(job, me) for job in jobs if job.owner == owner] for owner in self._ranks()]
        return self._exchange(results, sizes)

    def _taken(
        self, jobs: Sequence[Job], received: Sequence[Sequence[Tensor]]
    ) -> Iterator[tuple[int, Tensor]]:
        arrived = [iter(shards) for shards in received]
        for job in jobs:
            yield job.position, next(arrived[job.owner]).view(self._shape(job, self.group.rank()))

    def _exchange(self, sent: Sequence[Sequence[Tensor]], sizes: Sequence[Sequence[int]]) -> _Moving:
        """sent: what each rank gets; sizes: the numbers of elements that each rank sends here"""
        flat = [tensor.reshape(-1).to(WIRE) for tensors in sent for tensor in tensors]
        device = self.shards[0].local.device
        data = torch.cat(flat) if flat else torch.empty(0, dtype=WIRE, device=device)
        received = data.new_empty(sum(map(sum, sizes)))
        counts = [sum(tensor.numel() for tensor in tensors) for tensors in sent]
        into, out = (flat.view(torch.uint8).view(-1, WIRE.itemsize) for flat in (received, data))  # for gloo
        work = start_all_to_all(self.group, into, out, list(map(sum, sizes)), counts)
        return _Moving(work, data, received, sizes, self.group)

    def _ranks(self) -> Iterable[int]:
        return range(self.group.size())

    def _shape(self, job: Job, rank: int) -> tuple[int, ...]:
        shard = self.shards[job.position]
        assert shard.dim is not None
        length = sum(map(len, shard.ranges[rank]))
        return (*shard.shape[: shard.dim], length, *shard.shape[shard.dim + 1 :])

    def _elements(self, job: Job, rank: int) -> int:
        rows, columns = self._shape(job, rank)
        return rows * columns


@dataclass(frozen=True)
class _Moving:
    """An exchange under way; `sent` is kept until it is over."""

    work: Work
    sent: Tensor
    received: Tensor
    sizes: Sequence[Sequence[int]]
    group: ProcessGroup

    def wait(self) -> list[list[Tensor]]:
        """What each rank has sent, tensor by tensor."""
        try:
            self.work.wait()
        except RuntimeError as error:
            raise RuntimeError(
                f"optim: an all-to-all of matrices failed in process group '{self.group.group_name}' of "
                f"{self.group.size()} ranks, here on rank {dist.get_rank()}; a rank died, came too late, or "
                f"left the common order of calls. Cause: {error}"
            ) from error
        by_rank = self.received.split(list(map(sum, self.sizes)))
        return [list(own.split(list(sizes))) for own, sizes in zip(by_rank, self.sizes, strict=True)]
