"""Both ways in which buckets are reduced: in memory that ranks share, and over torch.distributed."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest.mock import patch
from weakref import WeakKeyDictionary

import pytest

from tests import on_ranks as on_plain_ranks
from tests.ranks import RankPool
from tpkernels.buckets import memory
from tpkernels.comm.transports import processes, select

T = TypeVar("T")

WAYS = ("shared", "c10d")

on_ranks = functools.partial(on_plain_ranks.on_ranks, fixtures=("way",))
both_ways = pytest.mark.way(*WAYS)  # a test that says nothing runs in the first


def under(way: str, function: Callable[..., T], *args: Any) -> T:
    """Call a function with TPKERNELS_TRANSPORT set so."""
    with patch.object(select, "requested_transport", way):
        return function(*args)


def on_machine(machine: str, function: Callable[..., T], *args: Any) -> T:
    """Call a function as if this rank ran on a machine of that name, with the default transport."""
    with moved_to(machine):
        return under("auto", function, *args)


@contextmanager
def moved_to(machine: str) -> Iterator[None]:
    """Ranks of a pool move, which others do not: they forget where each was."""
    with (
        patch.object(processes, "machine", lambda: machine),
        patch.object(memory, "_PLACES", WeakKeyDictionary()),
    ):
        yield


class Ranks:
    """Ranks that call functions in one of these ways."""

    def __init__(self, pool: RankPool, way: str) -> None:
        self.pool, self.way = pool, way

    def run(self, function: Callable[..., T], *args: Any, **options: Any) -> list[T]:
        return self.pool.run(under, self.way, function, *args, **options)

    def run_each(self, function: Callable[..., T], args: Sequence[Sequence[Any]], **options: Any) -> list[T]:
        return self.pool.run_each(under, [(self.way, function, *own) for own in args], **options)
