"""What a rank answers to a call, and the story of those that failed. None: no answer, the rank hangs."""

from __future__ import annotations

import pickle
import signal
import textwrap
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast


class RankFailure(RuntimeError):
    """Some ranks raised, died or hung. The message tells each one's story, the likely cause first."""

    def __init__(self, message: str, exceptions: dict[int, BaseException | None]) -> None:
        super().__init__(message)
        self.exceptions = exceptions  # of the ranks that failed; None: died, hung, or could not be pickled


@dataclass(frozen=True)
class Returned:
    result: bytes  # pickled


@dataclass(frozen=True)
class Raised:
    at: float  # of the monotonic clock, which all processes share: a cause sorts before its consequences
    summary: str
    traceback: str
    exception: bytes | None  # pickled, where it can be


@dataclass(frozen=True)
class Died:
    exitcode: int | None


Answer = Returned | Raised | Died


def attempt(function: Callable[..., Any], *args: Any) -> Returned | Raised:
    try:
        return Returned(pickle.dumps(function(*args)))
    except BaseException as error:  # SystemExit too: a rank answers every call
        at, exception = time.monotonic(), None
        with suppress(Exception):
            exception = pickle.dumps(error)
        summary = "".join(traceback.format_exception_only(error)).strip()
        return Raised(at, summary, "".join(traceback.format_exception(error)), exception)


def all_alive(answers: Sequence[Answer | None]) -> bool:
    return all(isinstance(answer, Returned | Raised) for answer in answers)


def failure(name: str, answers: Sequence[Answer | None], stacks: Sequence[str]) -> RankFailure:
    stories = []
    exceptions: dict[int, BaseException | None] = {}
    for rank in sorted(range(len(answers)), key=lambda rank: _order(answers[rank])):
        answer, details = answers[rank], stacks[rank]
        match answer:
            case Raised():
                summary, details = answer.summary, answer.traceback
            case Died():
                summary = _end(answer.exitcode)
            case Returned():
                summary = "returned"
            case None:
                summary = "no answer in time"
        stories.append(f"rank {rank}: {summary}\n{textwrap.indent(details, '    ')}")
        if not isinstance(answer, Returned):
            exceptions[rank] = _exception(answer)
    return RankFailure(
        "\n".join([f"{len(exceptions)} of {len(answers)} ranks failed: {name}", *stories]), exceptions
    )


def _order(answer: Answer | None) -> tuple[int, float]:
    """The likely cause first: deaths, exceptions by time, ranks that hang, ranks that are well."""
    match answer:
        case Died():
            return 0, 0.0
        case Raised():
            return 1, answer.at
        case None:
            return 2, 0.0
        case Returned():
            return 3, 0.0


def _end(exitcode: int | None) -> str:
    if exitcode is None:
        return "closed its pipe"
    if exitcode < 0:
        return f"killed by signal {-exitcode} ({signal.strsignal(-exitcode)})"
    return f"exited with code {exitcode}"


def _exception(answer: Answer | None) -> BaseException | None:
    if isinstance(answer, Raised) and answer.exception is not None:
        with suppress(Exception):  # many exceptions with arguments of their own can be pickled only one way
            return cast("BaseException", pickle.loads(answer.exception))
    return None
