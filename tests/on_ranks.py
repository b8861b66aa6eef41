"""Tests whose bodies run on ranks, and assert there."""

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
    """A test whose body runs on each rank of a world, once for each size of it.

    fixtures: what else the fixtures of ranks need, and the body does not
    """

    def decorated(body: Body) -> Body:
        @functools.wraps(body)
        def test(request: pytest.FixtureRequest, world: int, **arguments: Any) -> None:
            given = {name: value for name, value in arguments.items() if name not in fixtures}
            request.getfixturevalue(f"ranks{world}").run(_body_of, body.__module__, body.__name__, given)

        own = ("request", *fixtures, "world", *inspect.signature(body).parameters)
        parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in own]
        test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return pytest.mark.parametrize("world", worlds, ids=lambda world: f"ranks{world}")(test)

    return decorated


def equal_on_all(value: T) -> T:
    """A value that all ranks are to have."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    assert values == [value] * len(values)
    return value


def _body_of(module: str, test: str, arguments: Mapping[str, Any]) -> None:
    """On a rank, which finds a function by its name: there it is the test."""
    inspect.unwrap(getattr(importlib.import_module(module), test))(**arguments)
