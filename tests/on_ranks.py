"""A test whose body runs on every rank of a pool: its asserts hold on each of them.

@on_ranks("ranks2")
def test_sums_are_the_same_everywhere(dtype): ...
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

Test = Callable[..., None]


def on_ranks(pool: str = "ranks", timeout: float = 180.0) -> Callable[[Test], Test]:
    """pool: a fixture. The test's arguments are sent to every rank: they have to be what pickle takes."""

    def decorate(body: Test) -> Test:
        @functools.wraps(body)
        def test(**given: Any) -> None:
            __tracebackhide__ = True
            given.pop(pool).run(_run_body, body.__module__, body.__name__, given, timeout=timeout)

        names = [pool, *inspect.signature(body).parameters]
        keywords = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
        test.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
        return test

    return decorate


def _run_body(module: str, name: str, given: Mapping[str, Any]) -> None:
    """By name, under which ranks find the decorated test, and the body behind it."""
    getattr(importlib.import_module(module), name).__wrapped__(**given)
