"""A test whose body runs on every rank of a world: its asserts hold on each of them.

@on_ranks(2)
def test_sums_are_the_same_everywhere(dtype): ...
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import pytest
import torch.distributed as dist

T = TypeVar("T")
Body = Callable[..., None]


def on_ranks(*worlds: int, fixtures: tuple[str, ...] = ()) -> Callable[[Body], Body]:
    """Run a test's body on each rank. Its arguments are sent there: they have to be what pickle takes.

    worlds: how many ranks, once for each; none: those of the fixture `ranks`
    fixtures: what else the fixtures of ranks need, and the body does not
    """

    def decorated(body: Body) -> Body:
        @functools.wraps(body)
        def test(request: pytest.FixtureRequest, **arguments: Any) -> None:
            __tracebackhide__ = True
            given = {name: value for name, value in arguments.items() if name not in fixtures}
            pool = request.getfixturevalue(f"ranks{given.pop('size')}") if worlds else given.pop("ranks")
            pool.run(_body_of, body.__module__, body.__name__, given)

        names = ("request", *fixtures, "size" if worlds else "ranks", *inspect.signature(body).parameters)
        keywords = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
        test.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
        return pytest.mark.parametrize("size", worlds, ids="ranks{}".format)(test) if worlds else test

    return decorated


def of_all(value: T) -> list[T]:
    """The values of all ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def equal_on_all(value: T) -> T:
    """A value that all ranks are to have."""
    values = of_all(value)
    assert values == [value] * len(values)
    return value


def _body_of(module: str, test: str, arguments: Mapping[str, Any]) -> None:
    """On a rank, which finds a function by its name: there it is the test."""
    inspect.unwrap(getattr(importlib.import_module(module), test))(**arguments)
