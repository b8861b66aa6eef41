"""The environment variables `TPKERNELS_*`: which there are, what each may be, and which one was meant."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher

PREFIX = "TPKERNELS_"
ALIKE = 0.85  # of a name without the prefix, that is probably one of ours with a letter wrong


@dataclass(frozen=True)
class AllowedValues:
    """What a variable may be, as a pattern and in words."""

    pattern: str
    expected: str
    words: tuple[str, ...] = ()  # all that there are, where these are few

    def has(self, value: str) -> bool:
        return re.fullmatch(self.pattern, value) is not None


def _one_of(*words: str, or_empty: bool = True) -> AllowedValues:
    pattern = "|".join(map(re.escape, words)) + "|" * or_empty
    return AllowedValues(pattern, f"{'one of ' * bool(words[1:])}{', '.join(words)}", words)


_SWITCH = AllowedValues("[01]?", "0 or 1", ("0", "1"))
_ANYTHING = AllowedValues("(?s:.*)", "anything")
POWERS_OF_TWO = tuple(str(2**power) for power in range(11))  # up to tp_invariance.MOST_SEGMENTS
VARIABLES = {
    "TPKERNELS_BACKEND": _one_of("auto", "torch", "triton", or_empty=False),
    "TPKERNELS_BACKEND_SUMS": _SWITCH,
    "TPKERNELS_BATCH_INVARIANT": _SWITCH,
    "TPKERNELS_CACHE_DIR": _ANYTHING,
    "TPKERNELS_CHECK_REPLICAS": AllowedValues("[0-9]*", "a number of optimizer steps, or 0 for never"),
    "TPKERNELS_CXXFLAGS": _ANYTHING,  # of setup.py
    "TPKERNELS_DEBUG": _SWITCH,
    "TPKERNELS_GLUON": _SWITCH,
    "TPKERNELS_LIFELINE": _ANYTHING,  # from a launcher to its ranks
    "TPKERNELS_LOG": _one_of("choices"),
    "TPKERNELS_QUALIFY_PROGRESS": _ANYTHING,  # from `qualify` to its ranks
    "TPKERNELS_REQUIRE_EXT": _SWITCH,  # of setup.py
    "TPKERNELS_TP_INVARIANT": AllowedValues(
        f"0*({'|'.join(('0', *POWERS_OF_TWO))})?", "0 (off) or a power of two", ("0", *POWERS_OF_TWO)
    ),
    "TPKERNELS_TRANSPORT": _one_of("auto", "c10d", "shared", "symmetric", or_empty=False),
    "TPKERNELS_TUNE": _SWITCH,
}


def mistakes(environment: Mapping[str, str] = os.environ) -> Iterator[tuple[str, str]]:
    """Yield variables that nobody reads, or whose value is refused, and what to do about each."""
    for name, value in sorted(environment.items()):
        if name in VARIABLES:
            if not VARIABLES[name].has(value):
                yield name, f"{name}={value}: expected {VARIABLES[name].expected}{_meant_value(name, value)}"
        elif name.startswith(PREFIX):
            yield name, f"{name}={value}: nothing reads it; did you mean {_nearest(name)[1]}?"
        else:
            alike, nearest = _nearest(name)
            if alike >= ALIKE:
                yield name, f"{name}={value}: nothing reads it; did you mean {nearest}?"


def _nearest(name: str) -> tuple[float, str]:
    """Return how like the most similar variable is, 1 for the same, and its name."""
    return max((_likeness(name.upper(), known), known) for known in VARIABLES)


def _meant_value(name: str, value: str) -> str:
    words = VARIABLES[name].words
    if not words:
        return ""
    alike, nearest = max((_likeness(value.strip().lower(), word), word) for word in words)
    return f"; did you mean {nearest}?" if alike else ""


def _likeness(one: str, other: str) -> float:
    return SequenceMatcher(None, one, other).ratio()
