"""Which rank orthogonalizes which matrix, and in which round it is gathered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    """A matrix, by its position in the caller's list, and the rank of the group that owns it."""

    position: int
    owner: int


def plan_rounds(
    costs: Sequence[int], sizes: Sequence[int], ranks: int, round_bytes: int
) -> list[tuple[Job, ...]]:
    """Each matrix goes to the rank that has least to do in its round, expensive matrices first.

    costs: of orthogonalizing each
    sizes: of each full matrix, in bytes; a round has ranks x round_bytes or more, and a multiple of `ranks`
        matrices
    """
    expensive_first = sorted(range(len(costs)), key=lambda position: (-costs[position], position))
    rounds: list[tuple[Job, ...]] = []
    work = [0] * ranks  # of all rounds
    waiting: list[int] = []
    for number, position in enumerate(expensive_first, 1):
        waiting.append(position)
        is_full = sum(sizes[each] for each in waiting) >= ranks * round_bytes and not len(waiting) % ranks
        if is_full or number == len(costs):
            rounds.append(_shared_out(waiting, costs, work))
            waiting = []
    return rounds


def _shared_out(positions: Sequence[int], costs: Sequence[int], work: list[int]) -> tuple[Job, ...]:
    """Adds to `work`, which decides between ranks that have as much to do in this round."""
    here = [0] * len(work)
    jobs = []
    for position in positions:
        owner = min(range(len(work)), key=lambda rank: (here[rank], work[rank], rank))
        here[owner] += costs[position]
        work[owner] += costs[position]
        jobs.append(Job(position, owner))
    return tuple(jobs)
