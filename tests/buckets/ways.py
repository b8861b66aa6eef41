"""Both ways in which buckets are reduced: in memory that ranks share, and over torch.distributed."""

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar
from unittest.mock import patch

import pytest

from tests.ranks import RankPool
from tpkernels.comm.transports import mailbox, select

T = TypeVar("T")

WAYS = ("shared", "c10d")

both_ways = pytest.mark.way(*WAYS)  # a test that says nothing runs in the first


def under(way: str, function: Callable[..., T], *args: Any) -> T:
    """Call a function with TPKERNELS_TRANSPORT set so."""
    with patch.object(select, "requested_transport", way):
        return function(*args)


def on_machine(machine: str, function: Callable[..., T], *args: Any) -> T:
    """Call a function as if this rank ran on a machine of that name, with the default transport."""
    with patch.object(mailbox, "machine", lambda: machine):
        return under("auto", function, *args)


class Ranks:
    """Ranks that call functions in one of these ways."""

    def __init__(self, pool: RankPool, way: str) -> None:
        self.pool, self.way = pool, way

    def run(self, function: Callable[..., T], *args: Any, **options: Any) -> list[T]:
        return self.pool.run(under, self.way, function, *args, **options)

    def run_each(self, function: Callable[..., T], args: Sequence[Sequence[Any]], **options: Any) -> list[T]:
        return self.pool.run_each(under, [(self.way, function, *own) for own in args], **options)


def on_ranks(*worlds: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A test whose body runs on each rank of a world, once for each size of it."""

    def decorated(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(request: pytest.FixtureRequest, way: str, world: int, **arguments: Any) -> None:
            ranks = request.getfixturevalue(f"ranks{world}")
            ranks.run(_body_of, body.__module__, body.__name__, arguments)

        own = ("request", "way", "world", *inspect.signature(body).parameters)
        parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in own]
        test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return pytest.mark.parametrize("world", worlds, ids=lambda world: f"ranks{world}")(test)

    return decorated


def _body_of(module: str, test: str, arguments: Mapping[str, Any]) -> None:
    """On a rank, which finds a function by its name: there it is the test."""
    inspect.unwrap(getattr(importlib.import_module(module), test))(**arguments)
