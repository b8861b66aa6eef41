"""Places to build layers in, without other processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tests.fake_world import fake_rank
from tpkernels.groups.initialize import initialize_model_parallel
from tpkernels.groups.state import ParallelState


@contextmanager
def posing(rank: int, size: int) -> Iterator[ParallelState]:
    """Be this rank of a tensor-parallel group that moves no data."""
    with fake_rank(rank, size):
        yield initialize_model_parallel(size)
