"""A step of gradient buckets, which all ranks of its groups take: no rank leaves it alone.

What interrupts a part of it (Ctrl-C, a signal's handler, no memory) fails the groups: a rank whose caller
goes on would be a step behind, and every later average a mixture of two batches. Refusals leave the groups
alive: `zero` ends a step that was refused.

The first line of a part is covered. What comes before it, as the call begins, is the caller's, who has then
skipped a batch.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from tpkernels.buckets.live_group import LiveGroup
from tpkernels.comm.calls import calls_of
from tpkernels.errors import cause_of

_REFUSALS = RuntimeError, ValueError, TypeError


class BucketStep:
    """The step of one `GradientBuckets`. groups: the data-parallel one last"""

    def __init__(self, groups: Sequence[LiveGroup]) -> None:
        self._groups, self._process = groups, os.getpid()
        self._calls = [calls_of(group.get()) for group in groups]

    def require_usable(self) -> None:
        """Raise if a group has failed."""
        for group in self._groups:
            group.get()

    def fail(self, error: BaseException) -> None:
        """End all groups on all ranks: those of the others would wait for this rank."""
        for calls in self._calls:
            if calls.ranks > 1:
                calls.fail(f"{type(error).__name__}: {cause_of(error)}")

    def leave(self, error: BaseException) -> None:
        """Fail the groups unless they can go on; raise the first cause if the error does not name it."""
        if os.getpid() != self._process:  # a fork belongs neither to the groups nor to their stores
            return
        first = next((cause for calls in self._calls if (cause := calls.first_failure())), "")
        if first or not isinstance(error, _REFUSALS):
            self.fail(error)
        if first and isinstance(error, RuntimeError) and first not in str(error):
            raise RuntimeError(f"GradientBuckets: {error}. The first cause: {first}") from error


class HasStep(Protocol):
    """Takes part in a step."""

    _step: BucketStep


Of = TypeVar("Of", bound=HasStep)
Given = ParamSpec("Given")
Result = TypeVar("Result")


def part_of_a_step(
    method: Callable[Concatenate[Of, Given], Result],
) -> Callable[Concatenate[Of, Given], Result]:
    """Have all that a method raises, from its first line on, judged by its step."""

    @functools.wraps(method)
    def part(self: Of, /, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        try:
            self._step.require_usable()
            return method(self, *args, **kwargs)
        except BaseException as error:
            self._step.leave(error)
            raise

    return part
